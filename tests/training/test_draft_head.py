"""A draft head that was trained on a trace: it drafts better than an untrained one, and changes no token."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import cacheprobe as cp
from cacheprobe.cli.train import draft_head as command
from cacheprobe.engine.drafters import DraftHead
from cacheprobe.engine.drafters.draft_head import next_states
from cacheprobe.models.base import CachedLM
from cacheprobe.ops.equality import bitwise
from cacheprobe.tasks import CoinFlip, word_tokenizer
from cacheprobe.training.draft_head import _split, train_draft_head
from cacheprobe.training.settings import DraftHeadSettings
from cacheprobe_benchmarks.shared.tiny import TINY, tiny_model
from tests.tiny import PROMPTS, SMALL, loaded

SETTINGS: dict[str, Any] = dict(steps=300, batch=64, hidden=64, learning_rate=3e-3)
RUN: Any = {**SMALL, "capacity": 192, "sampling": cp.SamplingParams(stop_token_ids=())}
OTHER: Any = SMALL
TASK = CoinFlip(people=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama that knows the words of coin-flip questions."""
    tokenizer = word_tokenizer(TASK.vocabulary())
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama-tied", size=replace(TINY, vocab=len(tokenizer))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[CachedLM]:
    yield cp.load_model(str(folder))


@pytest.fixture(scope="module")
def trace(model: CachedLM) -> cp.Trace:
    capture = cp.CaptureConfig(sites="S", layers=(model.n_layers - 1,))
    return cp.run(model, [TASK.example(i, 0) for i in range(40)], **RUN, capture=capture)


def trained(trace: cp.Trace, **changes: Any) -> DraftHead:
    return train_draft_head(trace, DraftHeadSettings(**{**SETTINGS, **changes}), progress=False)


def test_it_drafts_better_than_untrained_on_held_out_questions(model: CachedLM, trace: cp.Trace) -> None:
    """And the committed tokens are those of a run without drafts."""
    head, untrained = trained(trace), trained(trace, steps=1, learning_rate=1e-9)
    agreement = float(str(head.about["held_out_acceptance"]))
    assert agreement > float(str(head.about["untrained_acceptance"])) + 0.05
    held_out = [TASK.example(i, 1) for i in range(8)]
    plain = cp.run(model, held_out, **RUN, capture=None, deterministic=True)
    runs = [cp.run(model, held_out, **RUN, capture=None, drafter=drafter) for drafter in (head, untrained)]
    for run in runs:
        assert [run.committed(i) for i in range(8)] == [plain.committed(i) for i in range(8)]
    accepted, before = (int(run.events().num_accepted.sum()) for run in runs)
    assert accepted > before


def test_pairs_hold_the_token_that_follows_and_its_state(trace: cp.Trace, model: CachedLM) -> None:
    """For each position p but the last: S at p, the token at p + 1, and S at p + 1, bit for bit."""
    wanted: list[tuple[bytes, int, bytes]] = []
    for request in trace.requests:
        states = trace.states("S", model.n_layers - 1, request.request_id).numpy()
        text = [*request.prompt_token_ids, *trace.committed(request.request_id)]
        wanted += [(a.tobytes(), text[p + 1], b.tobytes()) for p, (a, b) in enumerate(pairwise(states))]
    sides = _split(trace, model, DraftHeadSettings(**SETTINGS), torch.Generator().manual_seed(0))
    columns = [(side.states.numpy(), side.token_ids.tolist(), side.next_states.numpy()) for side in sides]
    assert all(len(ids) for _, ids, _ in columns)
    assert sorted(wanted) == sorted(
        (a.tobytes(), t, b.tobytes()) for one in columns for a, t, b in zip(*one, strict=True)
    )


def test_every_step_draws_other_tokens_and_their_weight_counts(
    trace: cp.Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[torch.Tensor] = []

    def recorded(weights: Any, states: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Also keeps the embeddings of a step's tokens, which have no noise."""
        drawn.append(embedded)
        return next_states(weights, states, embedded)

    monkeypatch.setattr("cacheprobe.training.draft_head.next_states", recorded)
    head = trained(trace, steps=3)
    steps = [one for one in drawn if len(one) == SETTINGS["batch"]]
    assert len(steps) == 3 and not any(torch.equal(a, b) for a, b in combinations(steps, 2))
    heavier = trained(trace, steps=3, token_weight=1.0)
    assert not bitwise(head.weights["joint"], heavier.weights["joint"])


def test_the_first_draft_token_is_the_models_own(trace: cp.Trace, model: CachedLM) -> None:
    run = cp.run(model, [TASK.example(0, 1)], **RUN, capture=None, drafter=trained(trace, steps=1))
    events = run.events()
    drafts = events[events.draft_token_ids.map(len) > 0]
    assert len(drafts) and (drafts.num_accepted > 0).all()


def test_the_command_writes_a_file_that_is_read_again(
    folder: Path, trace: cp.Trace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = trace.save(tmp_path / "run"), tmp_path / "head.safetensors"
    command(run, model=str(folder), out=out, **{**SETTINGS, "steps": 3}, progress=False)
    assert "on held-out requests the head has the model's likeliest token in" in capsys.readouterr().out
    again, same = DraftHead.load(out, length=2), trained(trace, steps=3)
    assert again.length == 2 and again.about == same.about and again.unembedding == same.unembedding
    assert all(bitwise(again.weights[name], same.weights[name]) for name in same.weights)
    with pytest.raises(ValueError, match=r"head.safetensors exists; choose another file"):
        command(run, model=str(folder), out=out, **SETTINGS, progress=False)
    out.write_bytes(out.read_bytes()[:-100])
    with pytest.raises(ValueError, match="holds no draft head"):
        DraftHead.load(out)


def test_what_does_not_fit_is_refused(trace: cp.Trace, model: CachedLM, tmp_path: Path) -> None:
    head = trained(trace, steps=1)
    with pytest.raises(ValueError, match="was trained for the unembedding"):
        head.check(loaded())
    with pytest.raises(ValueError, match="lacks up"):
        DraftHead({name: weight for name, weight in head.weights.items() if name != "up"}, "")
    with pytest.raises(ValueError, match="holds NaN or infinity"):
        DraftHead({**head.weights, "mean": head.weights["mean"] * float("nan")}, "")
    with pytest.raises(ValueError, match="must have shape"):
        DraftHead({**head.weights, "mean": head.weights["mean"][:3]}, "")
    for name, weight, says in [
        ("mean", head.weights["mean"].half(), "mean of a draft head must be float32, got torch.float16"),
        ("scale", head.weights["scale"] * 0, "scale of a draft head must be above 0"),
    ]:
        with pytest.raises(ValueError, match=says):
            DraftHead({**head.weights, name: weight}, "")
    with pytest.raises(ValueError, match="would draft nothing"):
        DraftHead(head.weights, "", length=0)
    other = cp.run(loaded(), PROMPTS[:2], **OTHER, capture="T")
    with pytest.raises(ValueError, match="needs S of the last layer: .*run with capture='S'"):
        trained(other)
    with pytest.raises(ValueError, match="the trace has one prompt"):
        trained(cp.run(loaded(), PROMPTS[:1], **OTHER, capture="S"))
    with pytest.raises(ValueError, match="a step draws 5000 tokens"):
        trained(trace, batch=5000)
    loaded_trace = cp.load_trace(trace.save(tmp_path / "run"))
    with pytest.raises(ValueError, match="loaded without its model"):
        trained(loaded_trace)
    loaded_trace.model = loaded()
    with pytest.raises(ValueError, match="the run was made with weights"):
        trained(loaded_trace)
