"""Pictures and tables of never verified requests that fill unused batch indices of verify passes (window=1)."""

import re
from pathlib import Path

import pandas as pd
import pytest

import cacheprobe as cp
from cacheprobe.analysis.windows import find_windows, verified_requests
from cacheprobe.trace.stored import StoredRun
from cacheprobe.trace.tables.token_history import standing_at, token_history
from cacheprobe.views.dashboard.run_tables import RunTables
from cacheprobe.views.diagrams.timeline import step_words, timeline_picture
from cacheprobe.views.report.figures import report_windows
from cacheprobe.views.report.listings import request_listings, run_listings
from cacheprobe.views.text import token_texts
from tests.tiny import PROMPTS, SMALL, loaded

VERIFIED = 1


@pytest.fixture(scope="module")
def trace() -> cp.Trace:
    return cp.run(loaded(), PROMPTS, **{**SMALL, "window": 1, "group": 4}, deterministic=[VERIFIED])


@pytest.fixture(scope="module")
def filling(trace: cp.Trace) -> pd.DataFrame:
    """The lines of the events table of never verified requests in verify passes."""
    events = trace.events()
    lines = events[(events.phase == "verify") & (events.request_id != VERIFIED)]
    assert (
        lines.request_id.nunique() == 3 and lines.num_accepted.isna().all() and lines.committed_token_ids.map(len).all()
    )
    return lines


def test_only_requests_with_a_verdict_are_listed_as_verified(trace: cp.Trace, filling: pd.DataFrame) -> None:
    listings = {listing.title: listing for listing in run_listings(trace)}
    kinds = [(row[1], row[5:8]) for row in listings["requests"].rows]
    assert kinds[VERIFIED] == ("deterministic", ("0", "0", "0"))
    assert [kind for i, kind in enumerate(kinds) if i != VERIFIED] == [("not verified", ("-", "-", "-"))] * 4
    num_verdicts = int(trace.events().num_accepted.notna().sum())
    assert dict(listings["verdicts"].rows)["verify passes of a request"] == str(num_verdicts) == "19"
    for listing in request_listings(trace, int(filling.request_id.iloc[0])):
        assert listing.title != "verdicts" or {count for _, count in listing.rows} == {"0"}
    assert verified_requests(trace.events()) == {VERIFIED}


def test_every_token_is_in_the_history(trace: cp.Trace, filling: pd.DataFrame) -> None:
    events = trace.events()
    history = token_history(events)
    last = standing_at(history, int(events.step.max()))
    for request_id in range(len(PROMPTS)):
        own = last[last.request_id == request_id].sort_values("place")
        assert own.token_id.tolist() == trace.committed(request_id) and own.place.tolist() == list(range(len(own)))
    filled = history.merge(
        filling[["request_id", "step"]], left_on=["request_id", "born"], right_on=["request_id", "step"]
    )
    assert len(filled) == len(filling) and (filled.outcome == "committed").all()


def test_pictures_draw_them_as_never_verified(trace: cp.Trace, filling: pd.DataFrame, tmp_path: Path) -> None:
    events = trace.events()
    request_id, step = int(filling.request_id.iloc[0]), int(filling.step.iloc[0])
    of_request = events[events.request_id == request_id]
    words = step_words(next(filling.itertuples()))
    assert words == "verify: a token committed without a verdict (the request filled an unused batch index)"
    picture = timeline_picture(events, [request_id], range(step, step + 1), len(PROMPTS), "").body
    assert words in picture and "#cp-dotted-grey" in picture and "#cp-verified" not in picture
    tables = RunTables(StoredRun(trace.save(tmp_path / "run")))
    assert [i for i, is_verified in tables.verified.items() if is_verified] == [VERIFIED]
    assert find_windows(events, request_id) == ()
    texts = token_texts(trace.row_table, trace.hypothesis_table)
    ((name, diagram),) = report_windows(trace, request_id, texts).items()
    tips = set(re.findall(r"committed as decoded; request \d+, position (\d+), step (\d+)", diagram.body))
    first = len(PROMPTS[request_id])
    steps = of_request[of_request.phase != "prefill"].step.tolist()
    assert name == "decoded" and step == steps[0]
    assert tips <= {(str(first + i), str(step)) for i, step in enumerate(steps, 1)} and len(tips) == 8
    ledgers = [trace.ledger(request_id, 1), trace.ledger(request_id)]
    assert "never verified" in cp.plots.decoded_diagram(request_id, events, ledgers, {})
