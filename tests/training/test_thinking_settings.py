"""What a Thinking States training is told: the form of its thoughts, and its time; and how long a state then lasts."""

import itertools
import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cacheprobe.tasks import FORMATS, annotate_all, word_tokenizer
from cacheprobe.training import loop
from cacheprobe.training.loop import LoopSettings
from cacheprobe.training.thinking.evaluate import Judgements
from cacheprobe.training.thinking.presets import PRESETS, Preset, preset_of
from cacheprobe.training.thinking.run import summary, train, train_thinking
from cacheprobe_analyses.thinking import minute_of_training as minute
from cacheprobe_analyses.thinking import thinking_variations as variations
from cacheprobe_analyses.thinking import thought_gap as gap
from tests.command import cacheprobe
from tests.thinking.test_thinking import tiny
from tests.training.test_thinking_training import SMALL


def quick(steps: int = 4) -> Preset:
    """The coin, learned by a small model in a second or not at all."""
    coin = preset_of("coin-flip", "tiny")
    return replace(coin, operations=(1, 2), pool=60, model=SMALL, loop=LoopSettings(steps=steps, batch=8), arms={})


def test_the_form_of_thoughts_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    form = "delta"
    monkeypatch.setitem(PRESETS["coin-flip"], "quick", quick())
    record = train_thinking("coin-flip", "quick", "thinking", 0, tmp_path, form=form, progress=False)
    assert record["form"] == form and record["command"].endswith(f"--seed 0 --form {form}")
    assert "never 99 %, never 100 %" in summary(record, tmp_path)
    assert preset_of("coin-flip", "quick").form == "restate" and preset_of("coin-flip", "paper").form == "state"


def test_an_unknown_form_is_one_line_that_names_them() -> None:
    with pytest.raises(
        ValueError, match="unknown form of thoughts 'prose'; choose one of state, restate, repeat, delta"
    ):
        preset_of("coin-flip", "tiny", "prose")
    done = cacheprobe("train", "thinking-states", "--form", "prose")
    assert done.returncode == 2 and "choose one of state, restate, repeat, delta" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "--form" in cacheprobe("train", "thinking-states", "--help").stdout


def test_a_training_of_another_form_or_arm_is_not_gone_on_with(tmp_path: Path) -> None:
    """Steps, shapes and seed are the same, so the second went on with the first's weights."""
    preset = quick()
    train(preset, "thinking", 0, tmp_path)
    with pytest.raises(ValueError, match="holds a training with form 'restate', not 'delta'; give another folder"):
        train(replace(preset, form="delta"), "thinking", 0, tmp_path)
    with pytest.raises(ValueError, match="with arm 'thinking', not 'no_feedback'"):
        train(preset, "no_feedback", 0, tmp_path)
    train(preset, "thinking", 0, tmp_path)


@pytest.fixture
def second_by_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every training step take one second of the processor."""
    readings = itertools.count()
    monkeypatch.setattr(loop, "time", SimpleNamespace(process_time=lambda: float(next(readings))))


@pytest.mark.usefixtures("second_by_second")
def test_a_training_may_be_broken_off_after_some_seconds() -> None:
    heard: list[int] = []
    made = train(quick(500), "thinking", 0, report=lambda at, _: heard.append(at.step), seconds=2.5)
    assert heard == [1, 2, 3] and made.cpu_seconds == 3.0 and not made.model.training
    assert train(quick(3), "thinking", 0, seconds=math.inf).cpu_seconds == 3.0


@pytest.mark.usefixtures("second_by_second")
def test_a_minute_says_what_it_came_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS["coin-flip"], "quick", quick(40))
    result = minute.run(minute.Config(presets=("quick",), seconds=2, texts=20))
    (line,) = result.lines
    assert line.steps == 2 < line.steps_of_preset == 40 and line.texts == 20 >= line.right and line.to_99 is None
    assert line.parameters == sum(w.numel() for w in train(quick(1)).model.parameters())
    held = json.loads(json.dumps(asdict(result)))
    assert minute.Result.of(held) == result
    assert f"| {line.steps} of 40 |" in result.table() and "| not reached | not reached |" in result.table()


def test_the_state_of_a_change_is_added_to_one_chunk_and_gone_from_the_next() -> None:
    """In the format delta; where every chunk names it, it never is."""
    heads, tails, empty = (5, 1, 0), (6, 1, 0), (1, 0, 0)
    model = tiny()
    with torch.inference_mode():
        delta = [model.states_of(torch.tensor([[said, empty, empty]]), 16)[0] for said in (heads, tails)]
        restate = [model.states_of(torch.tensor([[said] * 3]), 16)[0] for said in (heads, tails)]
    differs = [[not torch.equal(a[i : i + 4], b[i : i + 4]) for i in range(0, 16, 4)] for a, b in (delta, restate)]
    assert differs == [[False, True, False, False], [False, True, True, True]]


def test_gaps_are_as_long_as_is_said() -> None:
    words = word_tokenizer(preset_of("coin-flip", "tiny").vocabulary())
    for times, still in ((1, 1), (1, 40), (3, 9)):
        texts = gap.texts_of(times, still, 30, 7)
        flips = [[flipped for _, flipped in text.question.events] for text in texts]
        gaps = times * [True, *[False] * still]
        assert all(f[-len(gaps) :] == gaps for f in flips)
        assert len({len(f) for f in flips}) == 4 and {t.question.states[-1] for t in texts} == {"heads", "tails"}
        for text, item in zip(texts, annotate_all(texts, words, 4, "delta"), strict=True):
            behind = gap.chunks_behind(item.thoughts)
            named = annotate_all([text], words, 4, "restate")[0].thoughts
            # where every chunk names the state, it has been the same since
            assert len(set(named[-behind - 1 :])) == 1 and named[-behind - 2] != named[-1]
    assert gap.texts_of(3, 9, 3, 7) == gap.texts_of(3, 9, 30, 7)[:3]


def test_the_limit_of_a_format_is_the_first_gap_that_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"1 of 9": 90, "4 of 1": 100, "4 of 2": 99, "4 of 4": 70, "4 of 8": 99}
    chunks = {"1 of 9": (13, 13), "4 of 1": (3, 3), "4 of 2": (3, 4), "4 of 4": (5, 6), "4 of 8": (11, 13)}
    result = gap.Result(100, 0.99, chunks, {"delta": counts, "state": dict.fromkeys(counts, 100)}, {})
    once, four, _, last = result.limits()
    assert once.startswith("delta, 1 gap: at least 99 % right at none; 90.0 % (95 %") and once.endswith("at 13")
    assert four.startswith("delta, 4 gaps: at least 99 % right up to 4 chunks without a change; 70.0 % (95 %")
    assert four.endswith("at 6")
    assert last == "state, 4 gaps: at least 99 % right up to 13 chunks without a change, the most that were tried"
    assert "| 4 | 4 | 5 to 6 | 70.0 | 100.0 |" in result.table()
    small = [replace(v, preset=replace(quick(), form=v.preset.form)) for v in variations.variations()]
    monkeypatch.setattr(gap, "variations", lambda: tuple(small))
    asked = gap.run(gap.Config(((1, 1), (2, 3)), texts=6, folder=tmp_path))
    assert set(asked.right) == set(gap.MODELS) == set(FORMATS) - {"repeat"} and all(
        set(right) == {"1 of 1", "2 of 3"} for right in asked.right.values()
    )
    assert json.loads(json.dumps(asked.models))["delta"]["steps"] == 4
    lucky = Judgements((True,) * 6, (True, *[False] * 5), (True,) * 6)  # two wrong thoughts, and a right answer
    monkeypatch.setattr(gap, "evaluate", lambda model, items, arm: lucky)
    assert gap.run(gap.Config(((1, 1),), texts=6, folder=tmp_path)).right["delta"] == {"1 of 1": 1}
