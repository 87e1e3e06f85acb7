"""Which tokens another engine accepted from drafts, as vLLM's responses list them step by step."""

import pytest

import cacheprobe as cp
from cacheprobe.trace.replays.response import ReplayRefused, accepted_drafts
from cacheprobe.trace.replays.responses import read_json
from tests.replays.test_replay import ANSWERS, SETTINGS
from tests.tiny import PROMPTS, loaded


def response(accepted: object) -> dict:
    """What vLLM 0.32 answers with return_token_ids and --per-request-spec-decode-metrics detailed."""
    return {
        "object": "text_completion",
        "choices": [{"index": 0, "text": "", "token_ids": ANSWERS[1], "prompt_token_ids": PROMPTS[1]}],
        "metrics": {"speculative_decoding": {"num_spec_tokens": 3, "per_step_accepted": accepted}},
    }


@pytest.mark.parametrize("accepted", [[3, 0, 1, 2, 3], [3, 0, 1, 2, 2]])
def test_accepted_tokens_are_verified_again(accepted: list[int]) -> None:
    """Also if the last draft is longer than the text."""
    trace = cp.replay(loaded(), response(accepted), **SETTINGS)
    verified = trace.events().query("phase == 'verify'").sort_values("step")
    assert [len(ids) for ids in verified.draft_token_ids][:4] == accepted[:4]
    assert trace.committed(0) == ANSWERS[1] and not (trace.rows().status == "rolled_back").any()
    table = accepted_drafts(response(accepted)["metrics"], ANSWERS[1], "it")
    assert table[1] == tuple(ANSWERS[1][1:4]) and table[6] == (ANSWERS[1][6],) and min(table) == 1


def test_unknown_places_are_left_out() -> None:
    """vLLM lists no step without a draft, so the others' places cannot be known."""
    for accepted in ([3, 0, 1], [3, 0, 1, 2, 2, 3, 1]):
        with pytest.warns(UserWarning, match="per_step_accepted gives .* 14 were generated"):
            (one,) = read_json(response(accepted), "it")
        assert not one.drafts
    for given in (None, {}, {"speculative_decoding": None}, {"speculative_decoding": {"num_spec_steps": 3}}):
        assert accepted_drafts(given, ANSWERS[1], "it") == {}


@pytest.mark.parametrize("accepted", [7, "33", [1, "2"], [2, -1], [1.5], [None], {"0": 1}])
def test_broken_lists_are_refused(accepted: object) -> None:
    with pytest.raises(ReplayRefused, match="per_step_accepted"):
        list(read_json(response(accepted), "it"))


def test_logged_drafts_come_first() -> None:
    (one,) = read_json({**response([3, 0, 1, 2, 3]), "drafts": [[1, [5, 6]]]}, "it")
    assert one.drafts == {1: (5, 6)}
