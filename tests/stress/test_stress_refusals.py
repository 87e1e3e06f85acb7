"""The stress test runs its traffic in another shape if the trial of shapes refuses one, and says so.

Under MKL_CBWR=COMPATIBLE a stress test of 50,000 tokens ended at 6,163: it had drawn verify passes of 4 x 5 rows in
float32, which the trial refuses there.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from cacheprobe.core.config import EngineConfig
from cacheprobe.engine import consistency
from cacheprobe.engine.consistency import ShapeRefused
from cacheprobe.stress import mixed, refusals, soak
from cacheprobe.stress import run as stress_run
from cacheprobe.stress.mixed import mixed_episode
from cacheprobe.stress.refusals import NoShapeServes
from cacheprobe.stress.run import run_stress
from cacheprobe.stress.soak import one_episode
from cacheprobe.stress.subjects import other_shapes, tiny_subjects
from cacheprobe.stress.tally import Tally
from cacheprobe.stress.traffic import draw_request

pytestmark = pytest.mark.determinism

SUBJECT = next(s for s in tiny_subjects() if s.name == "llama" and s.window > 1)
SHAPE = SUBJECT.group, SUBJECT.window


@pytest.fixture(autouse=True)
def small_episodes() -> Iterator[None]:
    with patch.object(soak, "MOST_REQUESTS", {"tiny": 4}):
        yield


def refuse(monkeypatch: pytest.MonkeyPatch, is_refused: Callable[[tuple[int, int]], bool]) -> None:
    """The trial refuses verify passes of these (group, window), and judges all others as it does."""
    right = consistency._fault

    def fault(*shape: Any) -> str | None:
        _, batch, width, _, phase, _ = shape
        return "row 0 slot 2 gives other T" if phase == "verify" and is_refused((batch, width)) else right(*shape)

    monkeypatch.setattr(consistency, "_fault", fault)


@pytest.mark.parametrize("episode", [one_episode, mixed_episode])
def test_a_refused_shape_is_replaced(episode: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same requests run in another shape; they are counted for the subject whose shape was refused."""
    refuse(monkeypatch, lambda shape: shape == SHAPE)
    tally = Tally()
    for number in range(2):
        episode(SUBJECT, tally, [5, number])
    (used,) = tally.compared
    assert "row 0 slot 2 gives other T" in tally.refused[SUBJECT.key] and used not in tally.refused
    assert used.startswith(f"{SUBJECT.key} as W") and not tally.differences
    assert tally.compared_of(SUBJECT) == tally.num_compared > 0 and tally.episodes_of == {SUBJECT.key: 2}


def test_another_shape_has_the_same_model_and_requests() -> None:
    shapes = list(other_shapes(SUBJECT, 19))
    assert len({s.key for s in shapes}) == 19 and SHAPE not in {
        (s.group, s.window) for s in shapes if s.prefill_group == SUBJECT.prefill_group
    }
    assert [s.key for s in shapes] == [s.key for s in other_shapes(SUBJECT, 19)]
    assert shapes[0].model is SUBJECT.model and draw_request(shapes[0], 3) == draw_request(SUBJECT, 3)
    single = next(s for s in tiny_subjects() if s.window == 1)
    assert all(s.window == 1 and not s.pads_prefill for s in other_shapes(single, 19))
    for subject in (SUBJECT, single):
        shapes = list(other_shapes(subject, 19))
        assert len(shapes) == 19 and all(EngineConfig(**s.settings) for s in shapes)  # none is refused by its numbers


def test_the_record_says_which_shapes_were_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the progress line, in the summary and in stress.json; a stress test that goes on keeps them."""
    refuse(monkeypatch, lambda shape: shape == SHAPE)
    monkeypatch.setattr(stress_run, "tiny_subjects", lambda: [SUBJECT])
    monkeypatch.setattr(stress_run, "near_tie_subjects", list)
    notes: list[str] = []
    right = stress_run.Progress.set_done
    monkeypatch.setattr(stress_run.Progress, "set_done", lambda bar, done, n="": notes.append(n) or right(bar, done, n))
    before = run_stress(60, tmp_path, real=False, progress=False)
    said = f"shapes refused by the trial: {before['shapes_refused_by_trial']}"
    printed = capsys.readouterr().out
    assert said in notes[-1] and said in printed and f"  {SUBJECT.key}: verify passes of" in printed
    after = run_stress(before["compared_tokens"] + 30, tmp_path, real=False, progress=False)
    assert after["refused_shapes"] == before["refused_shapes"] and SUBJECT.key in after["refused_shapes"]
    assert after["shapes_refused_by_trial"] == len(after["refused_shapes"])
    assert json.loads((tmp_path / "stress.json").read_text()) == after and after["differences"] == 0


def test_it_ends_if_every_shape_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, lambda shape: True)
    tally = Tally()
    with pytest.raises(NoShapeServes, match=r"refused 20 shapes in a row.*OMP_NUM_THREADS"):
        one_episode(SUBJECT, tally, [5, 0])
    assert len(tally.refused) == refusals.MOST_REFUSED == 20 and not tally.num_compared


def test_any_other_error_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a refusal that comes from the oracle, once the run was computed."""

    def fail(error: Exception) -> Callable:
        def failing(*args: object, **settings: object) -> None:
            raise error

        return failing

    tally = Tally()
    for module, name, episode in ((soak, "run", one_episode), (mixed, "run", mixed_episode)):
        with monkeypatch.context() as patched, pytest.raises(ValueError, match="no refusal"):
            patched.setattr(module, name, fail(ValueError("no refusal")))
            patched.setattr(mixed, "stream", fail(ValueError("no refusal")))
            episode(SUBJECT, tally, [5, 0])
    for module, name, episode in ((soak, "reference_answer", one_episode), (mixed, "verify", mixed_episode)):
        with monkeypatch.context() as patched, pytest.raises(ShapeRefused, match="too late"):
            patched.setattr(module, name, fail(ShapeRefused("too late")))
            episode(SUBJECT, tally, [5, 0])
    assert not tally.refused and not tally.num_compared


def test_a_tally_from_before_refusals_were_counted_is_read(tmp_path: Path) -> None:
    Tally(episodes=3).save(tmp_path / "tally.json")
    held = json.loads((tmp_path / "tally.json").read_text())
    del held["refused"]
    (tmp_path / "tally.json").write_text(json.dumps(held))
    assert Tally.load(tmp_path / "tally.json").refused == {}
