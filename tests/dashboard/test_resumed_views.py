"""Requests that gave way with a draft open and came back: their pictures, windows and histories."""

from pathlib import Path

import pytest

import cacheprobe as cp
from cacheprobe.analysis.windows import find_windows
from cacheprobe.trace.tables.token_history import standing_at, token_history
from cacheprobe.views.dashboard import facts
from cacheprobe.views.dashboard.run_list import RunList
from cacheprobe.views.dashboard.tabs import replay
from cacheprobe.views.report.figures import report_drawings
from tests.engine.test_engine_errors import BAD, indigestible
from tests.invariants.runs import RUN
from tests.tiny import PROMPTS, SMALL, loaded

TIGHT = {**SMALL, "max_kv_tokens": 110, "prefill_chunk": 16, "pad_prefill": True, "draft_length": 3}


@pytest.fixture(scope="module")
def drafted() -> cp.Trace:
    trace = cp.run(loaded(), PROMPTS, **TIGHT, drafter=cp.drafters.EarlyExit(layer=1), capture="SZ")
    events = trace.events()
    assert (events[events.phase == "verify"].num_accepted.isna()).sum() > 2, "nobody's rows were rebuilt"
    return trace


@pytest.fixture(scope="module")
def run_list(drafted: cp.Trace, tmp_path_factory: pytest.TempPathFactory) -> RunList:
    return RunList.of([drafted.save(tmp_path_factory.mktemp("resumed") / "run")])


def test_the_dashboard_shows_them_at_every_step(drafted: cp.Trace, run_list: RunList) -> None:
    events = drafted.events()
    rebuilt = events[(events.phase == "verify") & events.num_accepted.isna()]
    request, step = int(rebuilt.request_id.iloc[0]), int(rebuilt.step.iloc[0])
    story = facts.request_story(run_list, {"run": 0, "request": request})
    assert [words for s, words, *_ in story["steps"] if s == step] == ["verify: its cache slots are rebuilt"]
    steps = [step, step + 20]
    assert (
        "its cache slots are rebuilt"
        in replay.Timeline(run_list, dict(run=0, requests=[0, 5], steps=steps, width=900)).draw()
    )
    for s in range(step - 3, step + 8):
        ask = dict(run=0, request=request, step=s)
        assert (
            "cache slots" in replay.CacheSlots(run_list, ask).draw()
            and "window" in replay.VerifyWindow(run_list, ask).draw()
        )
        assert "pending" not in replay.CacheSlots(run_list, ask).draw() or s >= int(
            rebuilt.step[rebuilt.request_id == request].iloc[2]
        )
        assert replay.TokenGrid(run_list, {**ask, "requests": [0, 5], "places": [0, 20], "place": 0}).draw()


def test_a_draft_that_was_abandoned_stands_until_then(tmp_path: Path) -> None:
    trace = cp.run(
        loaded(), PROMPTS, **{**TIGHT, "max_kv_tokens": 80}, drafter=cp.drafters.EarlyExit(layer=1), capture="SZ"
    )
    run_list, events = RunList.of([trace.save(tmp_path / "run")]), trace.events()
    verified = (
        f"drafted {trace.num_drafted} tokens that were verified: {trace.num_drafted - trace.num_rolled_back} accept"
    )
    assert trace.num_drafted < events.proposed_token_ids.map(len).sum() and verified in facts.run_summary(
        run_list.tables(0)
    )
    assert f" in {events.step.nunique()} steps. " in facts.run_summary(run_list.tables(0))
    history = token_history(events)
    one = history[history.outcome == "abandoned"].iloc[-1]  # of the first places, a rejected draft stood there before
    again = events[(events.request_id == one.request_id) & (events.phase == "prefill") & (events.step > one.born)]
    assert one.decided_step == again.step.min()
    ask = dict(run=0, request=int(one.request_id), requests=[0, 5], places=[0, 40], place=0)
    cell = f'data-request="{one.request_id}" data-place="{one.place}"'
    for step, is_there in (
        (one.born - 1, False),
        (one.born, True),
        (one.decided_step - 1, True),
        (one.decided_step, False),
    ):
        assert (cell in replay.TokenGrid(run_list, {**ask, "step": int(step)}).draw()) == is_there


def test_slots_that_were_freed_are_told_from_slots_not_written(drafted: cp.Trace, run_list: RunList) -> None:
    events = drafted.events()
    request = int(events[(events.phase == "verify") & events.num_accepted.isna()].request_id.iloc[0])
    second = int(events[(events.request_id == request) & (events.phase == "prefill")].step.iloc[1])
    assert "freed its slots" in replay.CacheSlots(run_list, dict(run=0, request=request, step=second - 1)).draw()
    late = max(range(len(PROMPTS)), key=lambda r: events[events.request_id == r].step.min())
    assert "holds no cache slots yet" in replay.CacheSlots(run_list, dict(run=0, request=late, step=0)).draw()


def test_a_report_of_a_request_that_was_decoded_twice() -> None:
    trace = cp.run(loaded(), PROMPTS, **TIGHT, capture="SZ")
    events = trace.events()
    prefills = events[events.phase == "prefill"].groupby("request_id").size()
    assert "decoded" in report_drawings(trace, int(prefills.idxmax())) and prefills.max() > 1


def test_requests_that_failed_while_they_were_read(tmp_path: Path) -> None:
    """One in its second chunk, and one in its first, of which no pass tells anything."""
    prompts = [PROMPTS[0], [4] * 9 + [BAD] * 9, [4, BAD]]
    with pytest.warns(RuntimeWarning, match="ended with an error"):
        trace = cp.run(indigestible(), prompts, **RUN, deterministic=[1, 2], capture="SZ")
    assert set(trace.events().request_id) == {0, 1} and not trace.committed(1)
    assert report_drawings(trace, 1) == {} and "decoded" in report_drawings(trace, 0)
    for request in (0, 1):
        assert f"Request {request}" in cp.plots.write_report(trace, tmp_path / "report.html", request).read_text()
    with pytest.raises(ValueError, match=r"no events of request 2; the table has 0, 1"):
        find_windows(trace.events(), 2)


def test_drafts_that_were_abandoned_belong_to_no_window() -> None:
    """A verify pass that failed of a candidate is run again without the draft."""
    settings = dict(SMALL, deterministic=True, capture="SZ")
    trace = cp.run(indigestible(), PROMPTS[:2], drafter=cp.drafters.Scripted(lambda state: [5, BAD]), **settings)
    events = trace.events()
    verdicts = events[events.phase == "verify"]
    assert (events.proposed_token_ids.map(len).sum()) > verdicts.draft_token_ids.map(len).sum()
    assert [len(find_windows(events, request)) for request in (0, 1)] == verdicts.groupby("request_id").size().tolist()
    history = token_history(events)
    abandoned = history[history.outcome == "abandoned"]
    assert len(abandoned) == events.proposed_token_ids.map(len).sum() - verdicts.draft_token_ids.map(len).sum()
    last = standing_at(history, int(events.step.max()))
    for request in (0, 1):
        assert last[last.request_id == request].sort_values("place").token_id.tolist() == trace.committed(request)
