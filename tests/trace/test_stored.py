"""Tables read a little at a time hold what the whole ones hold; the ledger counted is the ledger played."""

import pandas as pd
import pyarrow.parquet as pq
import pytest

import cacheprobe as cp
from cacheprobe.analysis.comparison import compare_requests, first_difference, first_reading_difference
from cacheprobe.trace import storage
from cacheprobe.trace.stored import StoredRun
from cacheprobe.trace.tables.build import ledger_at, rows_in_use
from cacheprobe.trace.tables.token_history import standing_at, token_history
from cacheprobe.views.report.run_comparison import UNCOMPARED, about_request, request_list
from tests.tiny import PROMPTS, SMALL, loaded, perturbed

EARLY = dict(drafter=cp.drafters.EarlyExit(layer=1), deterministic=[1])


@pytest.fixture(scope="module")
def trace() -> cp.Trace:
    return cp.run(loaded(), PROMPTS, **SMALL, **EARLY)


@pytest.fixture(scope="module")
def run(trace: cp.Trace, tmp_path_factory: pytest.TempPathFactory) -> StoredRun:
    """Saved in row groups of a hundred lines, so that a request has several and shares some."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "ROW_GROUP", 100)
        return StoredRun(trace.save(tmp_path_factory.mktemp("stored") / "run"))


def plain(table: pd.DataFrame) -> list[list]:
    """Every value, lists and arrays alike, null as None."""
    cells = table.astype(object).to_numpy().tolist()
    return [[list(c) if hasattr(c, "__len__") and not isinstance(c, str) else None if pd.isna(c) else c for c in row]
            for row in cells]  # fmt: skip


def test_readings_are_those_of_the_whole_table(trace: cp.Trace, run: StoredRun) -> None:
    path = next(run.directory.glob("hypotheses-*.parquet"))
    assert pq.ParquetFile(path).num_row_groups > len(PROMPTS)
    whole = trace.hypotheses(include_rolled_back=True)
    for request in range(len(PROMPTS)):
        own = whole[whole.request_id == request]
        assert plain(run.readings(request)) == plain(own)
        some = own[own.position.isin(range(8, 12))]
        assert plain(run.readings(request, range(8, 12))) == plain(some)
    assert run.token_texts.items() >= dict(zip(whole.token_id, whole.token, strict=True)).items()


def test_rows_in_use_are_those_of_the_played_ledger(trace: cp.Trace) -> None:
    counted = rows_in_use(trace.ledger_table)
    assert len(counted)
    for line in counted.itertuples():
        changes = trace.ledger_table[trace.ledger_table.request_id == line.request_id]
        assert line.rows == len(ledger_at(changes, line.step))


def test_the_history_ends_in_what_was_committed(trace: cp.Trace) -> None:
    history = token_history(trace.events())
    last = int(trace.events().step.max())
    end = standing_at(history, last)
    for request in range(len(PROMPTS)):
        own = end[(end.request_id == request) & end.state.isin(["committed", "pending"])].sort_values("place")
        assert own.token_id.tolist() == trace.committed(request)
        assert own.state.tolist()[-1] == "pending" and "pending" not in own.state.tolist()[:-1]
    assert (history.outcome == "rolled_back").sum() == trace.num_rolled_back > 0
    drafted = history[history.outcome.isin(["accepted", "rolled_back"])]
    assert len(drafted) == trace.num_drafted and (drafted.born <= drafted.decided_step).all()


def test_the_grid_after_a_step_is_what_was_known_then(trace: cp.Trace) -> None:
    """Slow twin: play the events of one request up to each step."""
    events = trace.events()
    history = token_history(events)
    own = events[events.request_id == 0].sort_values("step")
    for step in own.step:
        committed: list[int] = []
        waiting: list[int] = []
        for event in own[own.step <= step].itertuples():
            waiting = [*waiting, *event.proposed_token_ids] if event.phase == "decode" else []
            committed += event.committed_token_ids.tolist()
        shown = standing_at(history[history.request_id == 0], step).sort_values("place")
        kept = shown[shown.state.isin(["committed", "pending"])]
        assert kept.token_id.tolist() == committed
        assert shown[shown.state == "draft"].token_id.tolist() == waiting
        now = own[(own.step == step) & (own.phase == "verify")]
        lost = [t for e in now.itertuples() for t in e.draft_token_ids[len(e.committed_token_ids) :]]
        assert shown[shown.state == "rolled_back"].token_id.tolist() == lost


def test_compared_runs(trace: cp.Trace) -> None:
    def about(one: cp.Trace) -> list[dict]:
        return [{"prompt_token_ids": PROMPTS[i], "committed_token_ids": one.committed(i)} for i in range(len(PROMPTS))]

    again = cp.run(loaded(), PROMPTS, **SMALL, **EARLY)
    other = cp.run(perturbed(loaded(), 0.02), PROMPTS, **SMALL, **EARLY)
    same = compare_requests(about(trace), about(again), trace.events(), again.events())
    assert {d.what for d in same} == {"equal"}
    unrecorded = again.events().assign(committed_logprobs_nats=[[] for _ in range(len(again.events()))])
    equal = compare_requests(about(trace), about(again), trace.events(), unrecorded)
    assert {d.what for d in equal} == {"tokens equal"} and "tokens equal" in request_list(equal, 0)
    assert about_request(equal[0]) == f"Request 0 committed the same tokens in both; {UNCOMPARED}"
    apart = compare_requests(about(trace), about(other), trace.events(), other.events())
    for d in apart:
        a, b = trace.committed(d.request_id), other.committed(d.request_id)
        assert d.what == ("log-probabilities" if a == b else "tokens")
        if a != b:
            assert d.place is not None and a[: d.place] == b[: d.place] and a[d.place] != b[d.place]
    assert any(d.what == "tokens" for d in apart)
    shorter = compare_requests(about(trace)[:2], about(trace), trace.events(), trace.events())
    assert [d.what for d in shorter] == ["equal", "equal", "missing", "missing", "missing"]
    mine, its = (t.hypotheses().query("request_id == 0") for t in (trace, other))
    assert first_reading_difference(mine, mine) is None and first_reading_difference(mine, its) is not None
    assert first_difference([1, 2], [1, 2, 3]) == 2
