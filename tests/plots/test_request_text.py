"""The text of a request: what its colours, drafts and thoughts are, by a slow twin and by eye."""

import re

import pandas as pd
import pytest

import cacheprobe as cp
from cacheprobe.trace.tables.draft_verdicts import token_measures
from cacheprobe.views.report.request_text import MOST_TOKENS, text_parts, text_piece, with_feature
from tests.dictionaries.planted import random_dictionary
from tests.plots.test_picture_contract import drafted, thinking
from tests.tiny import PROMPTS, SMALL, loaded
from tests.twins.measures_slowly import token_measures_slowly

WHOLE = re.compile(r'<span class="pick[^"]*"[^>]*data-position="(\d+)" title="([^"]*)">([^<]*)</span>')


def none_or(value: object) -> object:
    return None if pd.isna(value) else value


@pytest.mark.parametrize(("request_id", "has_readings"), [(0, True), (2, False)])
def test_measures_are_those_of_the_twin(request_id: int, has_readings: bool) -> None:
    trace = drafted()
    events, table = trace.events(), trace.hypotheses()
    own, length = events[events.request_id == request_id], len(trace.requests[request_id].prompt_token_ids)
    readings = table[table.request_id == request_id] if has_readings else None
    found = token_measures(own, readings, length)
    names = ["token_id", "position", "outcome", "depth", "entropy", "logprob"]
    lines = [tuple(map(none_or, line)) for line in found[names].itertuples(index=False)]
    assert lines == token_measures_slowly(own, readings, length)
    assert found.token_id.tolist() == trace.committed(request_id)
    assert has_readings == bool(found.depth.notna().any())


def test_thoughts_are_below_the_last_token_of_their_chunk() -> None:
    trace = thinking()
    html = str(cp.plots.request_text(trace.rows(), trace.events(), 0, trace.hypotheses(), trace.thoughts()))
    own = trace.thoughts().query("request_id == 0 and status == 'committed' and said != ''")
    assert re.findall(r'<ruby class="thought">.*?<rt>([^<]*)</rt></ruby>', html) == own.sort_values("end").said.tolist()
    assert "coin&#x27;s state is" in html, "the tokens of a tokenizer of whole words are apart"


@pytest.mark.parametrize(("measure", "name"), [("depth", "depth"), ("entropy", "entropy"), ("logprob", "logprob")])
def test_the_strongest_colour_is_that_of_the_strongest_number(measure: str, name: str) -> None:
    trace = drafted()
    html = str(cp.plots.request_text(trace.rows(), trace.events(), 1, trace.hypotheses(), measure=measure))
    own = trace.events().query("request_id == 1")
    table = token_measures(own, trace.hypotheses().query("request_id == 1"), len(trace.requests[1].prompt_token_ids))
    shares = [float(share) for share in re.findall(r'class="pick shade" style="--p:([\d.]+)"', html)]
    numbers = table[table[name].notna()][name].to_numpy(dtype=float) * (-1 if name == "logprob" else 1)
    assert len(shares) == len(numbers) and shares[int(numbers.argmax())] == max(shares) <= 1
    ranked = [share for _, share in sorted(zip(numbers.tolist(), shares, strict=True))]
    assert ranked == sorted(ranked) and len(set(ranked)) > 1


def test_a_run_without_readings_has_verdicts_alone() -> None:
    trace = cp.run(loaded(), PROMPTS[:1], **SMALL, capture="S", deterministic=True)
    assert cp.plots.request_text(trace.rows(), trace.events(), 0).finding.startswith("Request 0 generated")
    with pytest.raises(ValueError, match="request 0 has no readings to take the entropy from; record Z"):
        cp.plots.request_text(trace.rows(), trace.events(), 0, measure="entropy")


def test_a_long_request_is_drawn_in_pages() -> None:
    trace = drafted()
    own = trace.events().query("request_id == 0")
    prompt = tuple(f"␣w{i}" for i in range(MOST_TOKENS + 5))
    parts = text_parts(0, prompt, len(prompt), own, None, None)
    first, later = (text_piece(parts, {}, "verdict", places) for places in (range(4), range(4, 8)))
    assert "… 5 tokens before\n w5 w6" in first.body and "w6" not in later.body
    assert [len(WHOLE.findall(piece.body)) for piece in (first, later)] == [4, 4]
    assert later.note == "Generated tokens 5 to 8."


def test_an_activation_that_is_not_known_is_not_shown_as_zero() -> None:
    """Rows that were not kept, and features below the largest that were recorded."""
    mine, drafter = random_dictionary(), cp.drafters.EarlyExit(layer=1)
    few = cp.CaptureConfig("Z", dictionary=mine, top_features=2, every=2)
    trace = cp.run(loaded(), PROMPTS[:1], **SMALL, drafter=drafter, capture=few)
    whole = cp.run(loaded(), PROMPTS[:1], **SMALL, drafter=drafter, capture="S").features(mine, top=48)
    committed = whole[whole.status == "committed"]
    parts = text_parts(0, (), len(PROMPTS[0]), trace.events(), None, None)
    for feature in committed.feature.unique():
        true = committed[committed.feature == feature].set_index("position").activation.to_dict()
        found = with_feature(parts, trace.features(top=2), int(feature)).tokens
        known = found[found.feature.notna()]
        assert all(line.feature == true.get(line.position + 1, 0.0) for line in known.itertuples())
    shown = with_feature(parts, whole, int(committed.feature.mode()[0])).tokens.feature
    assert shown.notna().sum() > 10 and pd.isna(shown.iloc[-1])
