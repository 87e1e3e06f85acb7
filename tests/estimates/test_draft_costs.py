"""Costs of drafts: a planted cost of each step shows in the table, and gives the time of a real run."""

from typing import Any

import pandas as pd
import pytest

import cacheprobe as cp
from cacheprobe.engine.drafters import EarlyExit, NGram
from cacheprobe.engine.estimates import draft_costs as module
from cacheprobe.engine.estimates.draft_costs import StepClock, draft_costs, timed_run
from cacheprobe.engine.model_runner import ModelRunner
from cacheprobe.engine.passes import Pass
from tests.tiny import PROMPTS, loaded

VERIFY, NARROW, DRAFT, PLAIN = 7.0, 3.0, 2.0, 5.0
"""Hours of a pass; NARROW is a verify pass without a draft."""


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Passes of the model take hours, and nothing else takes time. Returns the clock, in hours."""
    hours = [0.0]
    run = ModelRunner.run

    def costly(self: ModelRunner, a_pass: Pass) -> Any:
        is_drafted = max(len(entry.token_ids) for entry in a_pass.entries) > 1
        decode = DRAFT if a_pass.num_layers else PLAIN
        hours[0] += {"verify": VERIFY if is_drafted else NARROW, "decode": decode, "prefill": 100.0}[a_pass.phase]
        return run(self, a_pass)

    monkeypatch.setattr(ModelRunner, "run", costly)
    monkeypatch.setattr(module, "StepClock", lambda: StepClock(lambda: hours[0]))
    return hours


def test_planted_costs_are_measured_and_give_the_time_of_a_run(planted: list[float]) -> None:
    model, drafters = loaded(), [EarlyExit(layer=1), NGram()]
    costs = draft_costs(
        model, PROMPTS[:2], drafters, windows=(2, 4), max_new_tokens=12, repeats=1, progress=False, group=2
    )
    assert costs.verify_seconds.tolist() == [VERIFY] * 4 and costs.plain_seconds.tolist() == [PLAIN] * 4
    assert set(costs.undrafted_seconds) == {NARROW} and costs.draft_seconds.tolist() == [DRAFT, DRAFT, 0, 0]
    trace = cp.run(model, PROMPTS[:2], max_new_tokens=20, capture="Z", progress=False)
    expected = cp.analysis.expected_speedup(
        cp.analysis.acceptance(trace, drafters, windows=(2, 4), progress=False), costs
    )
    for line in expected.itertuples():
        drafter = EarlyExit(layer=1) if line.drafter == "early_exit" else NGram()
        real = timed_run(model, PROMPTS[line.request_id], drafter, 20, {"group": 2, "window": line.window})
        assert sum(not count for _, count in real.verify) == line.undrafted
        assert line.seconds == pytest.approx(real.seconds, rel=1e-9)
        assert line.plain_seconds == 19 * PLAIN and line.speedup == pytest.approx(19 * PLAIN / real.seconds)
        assert line.seconds_per_token == pytest.approx(real.seconds / 19)


def test_lenses_of_an_early_exit_have_costs_of_their_own(monkeypatch: pytest.MonkeyPatch, planted: list[float]) -> None:
    """A draft token that the tuned lens reads takes hours more."""
    model = loaded()
    tuned = cp.lenses.TunedLens.fresh(model)
    read = cp.lenses.TunedLens.logits

    def slow(lens: Any, *given: Any) -> Any:
        planted[0] += 11
        return read(lens, *given)

    monkeypatch.setattr(cp.lenses.TunedLens, "logits", slow)
    drafters = [EarlyExit(1), EarlyExit(1, tuned)]
    costs = draft_costs(model, PROMPTS[:1], drafters, windows=4, max_new_tokens=8, repeats=1, progress=False, group=2)
    assert costs.lens.tolist() == ["logit", "tuned"] and costs.draft_seconds.tolist() == [DRAFT, DRAFT + 11]
    trace = cp.run(model, PROMPTS[:1], max_new_tokens=8, capture="SZ", progress=False)
    for drafter, readings, cost in [(drafters[0], None, DRAFT), (drafters[1], tuned, DRAFT + 11)]:
        read_again = None if readings is None else cp.analysis.read_states(trace, readings)
        table = cp.analysis.acceptance(trace, drafter, windows=4, readings=read_again, progress=False)
        (line,) = cp.analysis.expected_speedup(table, costs).itertuples()
        passes = (line.passes - line.undrafted) * VERIFY + line.undrafted * NARROW
        assert line.seconds == pytest.approx(passes + line.drafted * cost)


def test_a_step_counts_by_its_median_and_all_steps_by_their_mean() -> None:
    """Other load in one repeat does not count; a long step of every repeat does."""
    clocks = [StepClock() for _ in range(3)]
    for clock, load in zip(clocks, (0, 100, 0), strict=True):
        clock.verify, clock.drafts = [(1.0, 3), (4.0 + load, 3), (1.0, 3)], [(2.0 + load, 3), (4.0, 6), (3.0, 0)]
    found = module._costs([clocks])
    assert found["verify_seconds"] == 2 + 1 and found["draft_seconds"] == 6 / 9
    assert found["undrafted_seconds"] != found["undrafted_seconds"]


def test_a_missing_cost_is_refused() -> None:
    trace = cp.run(loaded(), PROMPTS[:1], max_new_tokens=8, capture="Z", progress=False)
    table = cp.analysis.acceptance(trace, EarlyExit(layer=1), windows=4, progress=False)
    seconds = {name: [1.0] for name in ("verify_seconds", "undrafted_seconds", "draft_seconds", "plain_seconds")}
    of = dict(drafter=["early_exit"], settings=[None], layer=[0], lens=["logit"], window=[4])
    costs = pd.DataFrame({**of, **seconds}).astype({"layer": "Int64"})
    with pytest.raises(ValueError, match="no cost of drafter early_exit at layer 1 with the logit lens and window 4"):
        cp.analysis.expected_speedup(table, costs)
    with pytest.raises(ValueError, match="no column draft_seconds; give one from cp.draft_costs"):
        cp.analysis.expected_speedup(table, costs.drop(columns="draft_seconds"))
    assert cp.analysis.expected_speedup(table, costs.assign(layer=1)).speedup.notna().all()
    with pytest.raises(ValueError, match="repeats must be at least 1"):
        draft_costs(loaded(), PROMPTS[:1], NGram(), repeats=0)
    for settings, match in [
        (dict(max_new_tokens=2), "at least 3, so that a pass drafts, got 2"),
        (dict(prompts=[]), "at least one prompt and one drafter"),
        (dict(drafters=[EarlyExit(1), EarlyExit(1)]), "the same name, layer, lens and settings"),
    ]:
        given: dict[str, Any] = {"prompts": PROMPTS[:1], "drafters": NGram(), **settings}
        with pytest.raises(ValueError, match=match):
            draft_costs(loaded(), given.pop("prompts"), given.pop("drafters"), **given, progress=False)


def test_a_draft_that_was_not_measured_is_not_free() -> None:
    trace = cp.run(loaded(), PROMPTS[:1], max_new_tokens=8, capture="Z", progress=False)
    silent = cp.drafters.Scripted(lambda state: [])
    costs = draft_costs(loaded(), PROMPTS[:1], silent, windows=4, max_new_tokens=4, repeats=1, progress=False)
    assert costs.draft_seconds.isna().all() and costs.verify_seconds.notna().all()
    table = cp.analysis.acceptance(trace, silent, windows=4, progress=False)
    assert cp.analysis.expected_speedup(table, costs).speedup.notna().all()
    with pytest.raises(ValueError, match="no draft token of drafter scripted was measured"):
        cp.analysis.expected_speedup(table.assign(drafted=3), costs)
