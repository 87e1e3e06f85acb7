"""The sentence about one token: what became of the draft, and which layers had said so."""

import pandas as pd
import pytest

import cacheprobe as cp
from cacheprobe.trace.tables.token_history import TokenOutcome, outcomes_at, token_history
from cacheprobe.views.report.insight import first_insight, first_to_show, insight
from tests.tiny import PROMPTS, SMALL, loaded

TEXTS = {1: "A", 2: " A", 3: "\n"}


def readings(*first: int) -> pd.DataFrame:
    """First choices from layer 0 on."""
    table = pd.DataFrame({"layer": range(len(first)), "lens": "logit", "token_id": first})
    return table.sample(frac=1, random_state=0)


ROWS = pd.DataFrame({"step": [24, 23, 3], "num_layers": [6, 5, 6]})
"""Of one position: the verifier's, one that stopped after layer 4, and a whole one."""


LOST, KEPT = TokenOutcome(2, 23, 24, "rolled_back"), TokenOutcome(1, 24, 24, "recovered")
DRAFT = "“␣A”, drafted in step 23 from layer 4, was rolled back in step 24, and “A” committed in its place"
LENS, LAST = "Through the logit lens", "the last read,"


@pytest.mark.parametrize(
    ("first", "outcomes", "said"),
    [
        ((3, 2, 3, 2, 2, 1), (LOST, KEPT),
         f"{DRAFT}. {LENS}, layers 1 and 3 to 4 had “␣A” first; layer 5, the last read, alone had “A” first"),
        ((3, 2, 3, 1, 1), (LOST, KEPT), f"{DRAFT}. {LENS}, layer 1 had “␣A” first; “A” is first from layer 3 on"),
        ((1, 3, 1), (LOST, KEPT), f"{DRAFT}. {LENS}, layer 2, the last read, alone had “A” first"),
        ((3, 2, 2), (LOST, KEPT), f"{DRAFT}. {LENS}, layers 1 to 2, {LAST} had “␣A” first"),
        ((2, 2, 1, 2), (LOST, KEPT),
         f"{DRAFT}. {LENS}, layers 0 to 1 and 3, {LAST} had “␣A” first"),
        ((2, 1, 3), (LOST, KEPT), f"{DRAFT}. {LENS}, layer 0 had “␣A” first; layer 2, {LAST} had “⏎” first"),
        ((1, 1), (TokenOutcome(1, 3, 5, "accepted"),),
         f"“A”, drafted in step 3, was accepted in step 5. {LENS}, “A” is first from layer 0 on"),
        ((), (TokenOutcome(1, 3, 5, "accepted"),), "“A”, drafted in step 3, was accepted in step 5"),
        ((3, 1), (TokenOutcome(1, 5, 5, "bonus"),),
         f"“A” was committed in step 5, as the verifier's own. {LENS}, layer 1, {LAST} alone had “A” first"),
        ((), (TokenOutcome(1, 0, 0, "committed"),), "“A” was committed in step 0, as it was computed"),
        ((1,), (TokenOutcome(1, 4, None, None),), "“A” was drafted in step 4, and no verdict was spoken"),
        ((), (LOST, TokenOutcome(2, 30, 34, "accepted")),
         f"{DRAFT.split(', and')[0]} behind an earlier mismatch; “␣A” was committed in step 34"),
        ((), (TokenOutcome(2, 1, 3, "abandoned"),), "nothing was committed here"),
        ((), (), "nothing was committed here"),
        ((), (TokenOutcome(77, 0, 0, "committed"),), "“<77>” was committed in step 0, as it was computed"),
    ],
)  # fmt: skip
def test_each_fate_has_its_words(first: tuple[int, ...], outcomes: tuple[TokenOutcome, ...], said: str) -> None:
    assert insight(readings(*first), ROWS, outcomes, TEXTS) == said


def test_what_is_opened_is_the_first_rollback_that_kept_something() -> None:
    trace = cp.run(loaded(), PROMPTS, **SMALL, drafter=cp.drafters.EarlyExit(layer=1), deterministic=[1])
    events = trace.events()
    at = first_to_show(events)
    assert at is not None
    request, step, position = at
    partial = [(int(e.step), int(e.request_id)) for e in events.itertuples()
               if e.phase == "verify" and 0 < e.num_accepted < len(e.draft_token_ids)]  # fmt: skip
    assert (step, request) == min(partial)
    texts = trace.token_texts
    said = first_insight(cp.analysis.lens_readings(trace), trace.row_table, events, texts)
    assert said.startswith(f"request {request}, step {step}: ") and f"rolled back in step {step}" in said
    # the reading is of the row whose next token the verifier put in the draft's place
    place = position + 1 - len(PROMPTS[request])
    token = trace.committed(request)[place]
    assert f"and “{texts[token]}” committed in its place" in said
    own = outcomes_at(token_history(events[events.request_id == request]), place)
    assert [token.outcome for token in own][-1] == "recovered"
    assert first_insight(None, trace.row_table, events, texts) == said.split(". ")[0]
    nothing = cp.run(loaded(), PROMPTS[:1], **SMALL)
    assert first_to_show(nothing.events()) is None
    assert first_insight(None, nothing.row_table, nothing.events(), {}) == ""


def test_a_whole_window_that_ends_its_request_has_no_token_of_the_verifiers_own() -> None:
    """The place after the last token was looked up, and nothing was said to be committed there."""
    held = dict(request_id=0, margin_nats=None, proposed_token_ids=[], draft_token_ids=[], num_accepted=None,
                num_rolled_back=None, draft_start=None, committed_token_ids=[])  # fmt: skip
    events = pd.DataFrame(
        [
            held | dict(step=0, phase="prefill", committed_token_ids=[3]),
            held | dict(step=1, phase="decode", proposed_token_ids=[1]),
            held | dict(step=2, phase="verify", draft_token_ids=[1], num_accepted=1, num_rolled_back=0, draft_start=9,
                        committed_token_ids=[1]),
        ]
    )  # fmt: skip
    rows = pd.DataFrame(columns=["request_id", "position", "step", "num_layers"])
    at = first_to_show(events)
    assert at is not None and at[2] == 8
    assert (
        first_insight(None, rows, events, TEXTS) == "request 0, step 2: “A”, drafted in step 1, was accepted in step 2"
    )
