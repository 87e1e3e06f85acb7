"""Which draft a reading is compared with, what became of the draft, and what the tables leave out."""

from pathlib import Path

import pandas as pd
import pytest

import cacheprobe as cp
from cacheprobe.analysis.measures import prediction_depth
from cacheprobe.core.records import DISCARDED_DRAFT
from cacheprobe.trace.stored import StoredRun
from cacheprobe.trace.tables.draft_verdicts import drafts_table, parting, prediction_depths, shares_by_verdict
from tests.tiny import PROMPTS, SMALL, loaded
from tests.twins.measures_slowly import drafts_slowly, prediction_depth_slowly, shares_by_verdict_slowly

EVICTED = dict(max_kv_tokens=110, window=8, prefill_chunk=16, pad_prefill=True, drafter=cp.drafters.EarlyExit(layer=0))


@pytest.fixture(scope="module")
def drafted() -> cp.Trace:
    return cp.run(loaded(), PROMPTS, **SMALL, drafter=cp.drafters.EarlyExit(layer=1))


@pytest.fixture(scope="module")
def preempted() -> cp.Trace:
    trace = cp.run(loaded(), PROMPTS, **{**SMALL, **EVICTED})
    assert trace.meta["preemptions"]
    return trace


@pytest.fixture(scope="module")
def looked_up() -> cp.Trace:
    return cp.run(loaded(), PROMPTS, **SMALL, drafter=cp.drafters.NGram())


@pytest.fixture(scope="module")
def cancelled() -> cp.Trace:
    """A request is cancelled while nobody has judged its draft, where an earlier draft was rolled back."""
    requests = [cp.Request(PROMPTS[0], arrival_step=12), cp.Request(PROMPTS[1])]
    settings = {**SMALL, "group": 1, "window": 8, "drafter": cp.drafters.EarlyExit(layer=0), "capture": "SZ"}
    del settings["progress"]
    pieces = cp.stream(loaded(), requests, **settings)
    for piece in pieces:
        if piece.request_id == 0:
            pieces.cancel(1)
    trace = pieces.trace()
    history = drafts_table(trace.events()).query("request_id == 1")
    lost = set(history[history.judged.notna() & (history.verdict != "accepted")].place)
    assert trace.meta["finish"]["1"] == "cancelled" and lost & set(history[history.judged.isna()].place)
    return trace


def test_a_draft_that_nobody_judged_is_not_taken_for_an_earlier_one(cancelled: cp.Trace) -> None:
    """`make stress` found it: rows that were abandoned were said to be rolled back like an earlier draft there."""
    assert (cancelled.row_table.status == "abandoned").any()
    assert cp.verify(cancelled, loaded(), progress=False).first_difference is None


@pytest.mark.parametrize("name", ["drafted", "preempted", "looked_up"])
def test_every_reading_names_the_draft_that_stood_at_its_position(name: str, request: pytest.FixtureRequest) -> None:
    trace = request.getfixturevalue(name)
    wanted = drafts_slowly(trace)
    table = cp.analysis.lens_readings(trace, include_rolled_back=True)
    found = 0
    for row in table.drop_duplicates("row").itertuples():
        token, verdict = wanted.get((row.request_id, row.step, row.position), (None, None))
        mine = (None, None) if pd.isna(row.verdict) else (row.drafted_token_id, row.verdict)
        assert mine == (token, verdict)
        assert pd.isna(row.verdict) or row.drafted_token == trace.token_texts[token]
        found += token is not None
    assert found > 10


@pytest.mark.parametrize("name", ["drafted", "preempted", "looked_up"])
def test_counts_of_drafts_are_those_of_the_events(name: str, request: pytest.FixtureRequest) -> None:
    trace = request.getfixturevalue(name)
    drafts, events = drafts_table(trace.events()), trace.events()
    judged = events[events.num_accepted.notna()]
    assert (drafts.verdict == "accepted").sum() == judged.num_accepted.sum()
    assert (drafts.verdict == "rejected").sum() == (judged.num_rolled_back > 0).sum() > 0
    lost = drafts[(drafts.verdict == "unverified") & drafts.judged.notna()]
    assert len(lost) + (drafts.verdict == "rejected").sum() == trace.num_rolled_back
    assert len(drafts) == events.proposed_token_ids.map(len).sum()


def test_a_rejected_drafts_reading_is_compared_with_what_was_committed_there(drafted: cp.Trace) -> None:
    """The committed token that replaced it, not one that followed it."""
    table = drafted.hypotheses().query("verdict == 'rejected' and phase == 'verify'")
    assert len(table) and (table.drafted_token_id != table.committed_token_id).all()
    texts = {i: [*prompt, *drafted.committed(i)] for i, prompt in enumerate(PROMPTS)}
    for row in table.itertuples():
        assert row.committed_token_id == texts[row.request_id][row.position + 1]
    top = table[table.layer == 2]
    assert (top.token_id == top.committed_token_id).all()
    accepted = drafted.hypotheses().query("verdict == 'accepted'")
    assert (accepted.drafted_token_id == accepted.committed_token_id).all()


def test_rows_that_were_fed_a_rejected_token_are_left_out_unless_asked_for(drafted: cp.Trace) -> None:
    every, usual = drafted.hypotheses(include_rolled_back=True), drafted.hypotheses()
    assert set(usual.status) == {"committed", "superseded"} and "rolled_back" in set(every.status)
    pd.testing.assert_frame_equal(usual, every[every.status != "rolled_back"].reset_index(drop=True))
    read = cp.analysis.read_states(drafted, cp.lenses.LogitLens())
    assert set(read.row) == set(usual.row) and set(usual.columns) == set(read.columns)
    lost = drafted.rows(0, status="rolled_back")
    assert set(cp.analysis.read_states(drafted, cp.lenses.LogitLens(), rows=lost).status) == {"rolled_back"}
    assert set(cp.analysis.prediction_depth(drafted).row) <= set(usual.row)


def test_readings_name_the_token_that_their_row_read(drafted: cp.Trace, tmp_path: Path) -> None:
    fed = drafted.row_table.set_index("row")
    drafted.save(tmp_path / "run")
    stored = StoredRun(tmp_path / "run").readings(0)
    for table in (
        cp.analysis.lens_readings(drafted, include_rolled_back=True),
        cp.analysis.read_states(drafted, cp.lenses.LogitLens()),
        stored,
    ):
        assert table.read_token.tolist() == fed.token[table.row].tolist()
        assert table.read_token_id.tolist() == fed.token_id[table.row].tolist()
        assert table.columns.tolist().index("read_token_id") == table.columns.tolist().index("position") + 1


def test_drafts_that_were_abandoned_are_no_rolled_back_ones(preempted: cp.Trace) -> None:
    """A row of a decode pass is rolled back where a verdict rolled its token back, and abandoned where none came."""
    rows, history = preempted.row_table, drafts_table(preempted.events())
    abandoned = rows[rows.status == "abandoned"]
    assert len(abandoned) and (abandoned.phase == "decode").all() and (abandoned.role == "abandoned").all()
    unjudged = history[history.judged.isna()]
    prompts = {r.request_id: r.num_prompt_tokens for r in preempted.requests}
    fed = {(d.request_id, prompts[d.request_id] + d.place, d.born) for d in unjudged.itertuples()}
    for row in abandoned.itertuples():
        born = [b for r, p, b in fed if (r, p) == (row.request_id, row.position) and b < row.step]
        assert born
    verify = rows[(rows.phase == "verify") & rows.status.isin(DISCARDED_DRAFT)]
    assert (verify.status == "rolled_back").all()
    assert cp.verify(preempted, loaded()).is_equal


def test_shares_are_those_counted_slowly(drafted: cp.Trace) -> None:
    table = cp.analysis.lens_readings(drafted, include_rolled_back=True)
    slowly = shares_by_verdict_slowly(table)
    shares = shares_by_verdict(table)
    assert len(shares) == len(slowly) and {"accepted", "rejected"} <= set(shares.verdict)
    for line in shares.itertuples():
        rows, committed, drafted_first = slowly[line.layer, line.verdict]
        assert (line.rows, line.committed_first) == (rows, pytest.approx(committed, abs=1e-9))
        assert (
            pd.isna(line.drafted_first) if drafted_first is None else line.drafted_first == pytest.approx(drafted_first)
        )
    agreement = cp.analysis.agreement(drafted).stack()
    assert agreement.to_dict() == pytest.approx(shares.set_index(["layer", "verdict"]).committed_first.to_dict())


def test_the_sentence_names_the_layer_where_the_committed_token_wins() -> None:
    def shares(*pairs: tuple[float, float], verdict: str = "rejected") -> pd.DataFrame:
        return pd.DataFrame(
            [
                dict(layer=i, verdict=verdict, rows=9, committed_first=c, drafted_first=d)
                for i, (c, d) in enumerate(pairs)
            ]
        )

    assert "from layer 2 on" in parting(shares((0.9, 0), (0.1, 0.5), (0.6, 0.2), (1, 0)))
    assert "the draft leads up to the last layer read" in parting(shares((0.9, 0), (0.1, 0.5)))
    assert "at least half of the readings from layer 1 on" in parting(
        shares((0.2, 0.2), (0.5, 0.5), verdict="accepted")
    )
    assert "at no last layer" in parting(shares((0.9, 0), (0.1, 0), verdict="not_drafted"))


def test_the_texts_of_all_choices_are_stored(drafted: cp.Trace, tmp_path: Path) -> None:
    run = StoredRun(drafted.save(tmp_path / "run"))
    named = {int(token) for ids in drafted.hypotheses(include_rolled_back=True).top_token_ids for token in ids}
    assert named <= set(run.token_texts)
    again = cp.load_trace(run.directory).hypotheses()
    assert again.top_tokens.map(list).tolist() == [
        [drafted.token_texts[int(token)] for token in ids] for ids in again.top_token_ids
    ]


def test_settling_and_the_readings_have_one_prediction_depth(drafted: cp.Trace) -> None:
    """In whatever order the readings stand, and over those of some layers alone."""
    table = cp.analysis.lens_readings(drafted, include_rolled_back=True)
    for shown in (table, table.sample(frac=1, random_state=0), table[table.layer < 2]):
        wanted = prediction_depth_slowly(shown)
        lines = prediction_depth(shown).itertuples()
        assert {r.row: (r.prediction_depth, r.num_flips, r.path) for r in lines} == wanted
        depths = [wanted[row][0] for row in shown.row]
        assert prediction_depths(shown).tolist() == depths and len(set(depths)) > 1
        assert len(shown[shown.layer == 2]) == 0 or shown.prediction_depth.tolist() == depths
