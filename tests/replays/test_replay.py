"""`cp.replay`: the states of tokens that another program generated, of its rejected drafts too."""

import warnings
from itertools import chain
from pathlib import Path

import pandas as pd
import pytest
import torch

import cacheprobe as cp
from cacheprobe.engine import committer
from cacheprobe.engine.drafters.replayed import Replayed
from cacheprobe.models.base import CachedLM
from cacheprobe.trace.replays.response import ReplayRefused
from tests.dashboard.growing_run import go_on, part_each_round
from tests.tiny import PROMPTS, VOCAB, hf_model, loaded
from tests.twins.equivalence import replayed_slowly

SETTINGS = dict(window=4, group=2, capacity=96, progress=False)


def sampled(count: int, seed: int) -> list[int]:
    """Tokens that no greedy model would choose one after the other."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (count,), generator=generator).tolist()


ANSWERS = [sampled(count, seed) for seed, count in enumerate((9, 14, 1, 6, 20))]


def plain(logprobs: list[list[float]] | None = None) -> list[dict]:
    """The responses in the plain layout."""
    responses = [{"prompt_token_ids": p, "token_ids": a} for p, a in zip(PROMPTS, ANSWERS, strict=True)]
    for response, nats in zip(responses, logprobs or [], strict=False):
        response["logprobs"] = nats
    return responses


def true_logprobs(family: str = "llama") -> list[list[float]]:
    found = []
    for prompt, answer in zip(PROMPTS, ANSWERS, strict=True):
        nats = replayed_slowly(hf_model(family), [*prompt, *answer])[1]
        found.append([float(nats[len(prompt) - 1 + i, token]) for i, token in enumerate(answer)])
    return found


@pytest.mark.parametrize(("family", "is_deterministic"), [("llama", True), ("gpt2", False), ("gemma3", True)])
def test_states_and_logprobs_are_those_of_a_plain_forward(family: str, is_deterministic: bool) -> None:
    """close(1e-4): other orders of the same sums in float32."""
    trace = cp.replay(loaded(family), plain(), **SETTINGS, deterministic=is_deterministic)
    for number, (prompt, answer) in enumerate(zip(PROMPTS, ANSWERS, strict=True)):
        assert trace.committed(number) == answer
        states, nats = replayed_slowly(hf_model(family), [*prompt, *answer])
        for layer, expected in enumerate(states):
            torch.testing.assert_close(trace.states("S", layer, number), expected[:-1], rtol=1e-4, atol=1e-4)
        expected = [float(nats[len(prompt) - 1 + i, token]) for i, token in enumerate(answer)]
        assert trace.logprobs(number) == pytest.approx(expected, abs=1e-4)
    assert trace.meta["finish"] == {str(i): "length" for i in range(len(PROMPTS))}


def test_the_model_itself_says_something_else() -> None:
    free = cp.run(loaded(), PROMPTS, **SETTINGS, max_new_tokens=9)
    assert [free.committed(i)[:9] for i in range(5)] != [answer[:9] for answer in ANSWERS]


def test_rejected_drafts_of_the_other_program_have_their_states() -> None:
    answer, wrong = ANSWERS[1], [(token + 1) % VOCAB for token in ANSWERS[1]]
    drafts = [{"start": 1, "token_ids": [*answer[1:3], *wrong[3:5]]}, {"start": 4, "token_ids": wrong[4:6]}]
    response = {"prompt_token_ids": PROMPTS[1], "token_ids": answer, "drafts": drafts}
    trace = cp.replay(loaded(), response, capacity=96, progress=False)
    assert trace.committed(0) == answer
    rows = trace.rows(status="rolled_back")
    fed = [(len(PROMPTS[1]) + 3, [*answer[:3], *wrong[3:5]]), (len(PROMPTS[1]) + 4, [*answer[:4], *wrong[4:6]])]
    assert rows.token_id.tolist() == [*wrong[3:5], *wrong[4:6]]
    for step, (first, text) in zip(rows.step.unique(), fed, strict=True):
        own = rows[rows.step == step]
        assert own.position.tolist() == list(range(first, first + len(own)))
        states, _ = replayed_slowly(hf_model(), [*PROMPTS[1], *text])
        torch.testing.assert_close(trace.vectors("S", 0, own), states[0][first:], rtol=1e-4, atol=1e-4)
    table = cp.analysis.engine_differences(trace)
    assert table.is_accepted_draft.tolist() == [False, True, True] + [False] * 11


def test_the_two_engines_are_compared_token_by_token(capsys: pytest.CaptureFixture[str]) -> None:
    nats = true_logprobs()
    nats[3][2] -= 0.25
    trace = cp.replay(loaded(), plain(nats), **SETTINGS | {"progress": True})
    table = cp.analysis.engine_differences(trace)
    assert len(table) == sum(map(len, ANSWERS)) and table.token_id.tolist() == [*chain(*ANSWERS)]
    worst = table.loc[table.difference_nats.abs().idxmax()]
    assert (worst.request_id, worst.position) == (3, len(PROMPTS[3]) + 2)
    assert worst.difference_nats == pytest.approx(0.25, abs=1e-4)
    assert table.difference_nats.drop(worst.name).abs().max() < 1e-4
    assert "by 0.2500 at most, at position 4 of request 3" in capsys.readouterr().out
    for number, (prompt, answer) in enumerate(zip(PROMPTS, ANSWERS, strict=True)):
        logits = replayed_slowly(hf_model(), [*prompt, *answer])[1][len(prompt) - 1 : -1]
        better = [int((row > row[token]).sum()) for row, token in zip(logits, answer, strict=True)]
        assert table[table.request_id == number]["rank"].tolist() == better


def test_far_logprobs_are_warned_of() -> None:
    nats = [[one - 1.0 for one in of_request] for of_request in true_logprobs()]
    with pytest.warns(UserWarning, match="1.0000 nats on average.*same"):
        cp.replay(loaded(), plain(nats), **SETTINGS)


def test_a_replay_is_equal_to_the_reference_and_is_stored(tmp_path: Path) -> None:
    trace = cp.replay(loaded(), plain(true_logprobs()), **SETTINGS, deterministic=True, out=tmp_path / "run")
    again = cp.load_trace(tmp_path / "run", loaded())
    assert again.requests[1].forced_token_ids == tuple(ANSWERS[1])
    replay = cp.verify(again)
    assert replay.is_equal and replay.num_requests == 5 and replay.num_states > 500
    pd.testing.assert_frame_equal(cp.analysis.engine_differences(again), cp.analysis.engine_differences(trace))


def test_an_interrupted_replay_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part_each_round(monkeypatch)
    requests = [cp.Request(p, forced_token_ids=tuple(a)) for p, a in zip(PROMPTS, ANSWERS, strict=True)]
    settings = {name: value for name, value in SETTINGS.items() if name != "progress"}
    stream = cp.stream(
        loaded(), requests, **settings, drafter=Replayed(), deterministic=True, capture="SZ", out=tmp_path / "run"
    )
    go_on(stream, tmp_path / "run", 4)
    stream.close()
    resumed = cp.resume(tmp_path / "run", loaded(), drafter=Replayed(), progress=False)
    whole = cp.replay(loaded(), plain(), **SETTINGS, deterministic=True, capture="SZ")
    for number, answer in enumerate(ANSWERS):
        assert resumed.committed(number) == answer
        assert torch.equal(resumed.states("S", 1, number), whole.states("S", 1, number))


def test_a_drafter_is_judged_by_the_given_tokens() -> None:
    """Which of its drafts would have been accepted: those that equal the other program's tokens."""
    answer = [5, 6, 7, 8] * 4
    trace = cp.replay(
        loaded(), {"prompt_token_ids": [5, 6, 7, 8, 5], "token_ids": answer[1:]},
        **SETTINGS, drafter=cp.drafters.NGram(),
    )  # fmt: skip
    events = trace.events()
    verified = events[events.num_accepted.notna()]
    assert trace.committed(0) == answer[1:] and int(verified.num_accepted.sum()) > 8
    table = cp.analysis.engine_differences(trace)
    assert table.is_accepted_draft.isna().all()
    early = cp.replay(loaded(), plain(), **SETTINGS, drafter=cp.drafters.EarlyExit(layer=1))
    assert [early.committed(i) for i in range(5)] == ANSWERS and len(early.rows(status="rolled_back")) > 20


def test_a_draft_that_no_pass_fed_is_warned_of() -> None:
    """No pass begins at token 3, because the draft at 1 is accepted up to 4."""
    answer = ANSWERS[1]
    drafts = [[1, answer[1:4]], [3, [5]], [5, answer[5:8]]]
    response = {"prompt_token_ids": PROMPTS[1], "token_ids": answer, "drafts": drafts}
    with pytest.warns(UserWarning, match="1 of 3 drafts .* first that of request 0 at token 3"):
        cp.replay(loaded(), response, capacity=96, progress=False)
    with pytest.warns(UserWarning, match="2 of 2 drafts .* smaller than the draft"):
        cp.replay(loaded(), {**response, "drafts": [drafts[0], drafts[2]]}, **SETTINGS | {"window": 3})


def test_a_draft_beyond_the_end_is_cut() -> None:
    """The last token comes with the pass that fed the one before."""
    answer = ANSWERS[3]
    response = {"prompt_token_ids": PROMPTS[3], "token_ids": answer, "drafts": [[2, [*answer[2:], 1, 2, 3] * 50]]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace = cp.replay(loaded(), response, capacity=96, progress=False)
    assert trace.meta["config"]["window"] == 4 and trace.committed(0) == answer


def test_a_stored_replay_with_drafts_resumes_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part_each_round(monkeypatch)
    answer = ANSWERS[4]
    drafts = {1: [answer[1], 3], 3: [*answer[3:5], 4, 4], 6: [1, 2], 7: answer[7:9]}
    own = Replayed({0: {at: tuple(ids) for at, ids in drafts.items()}})
    assert Replayed.from_record(own.record()) == own and repr(Replayed({0: {1: (5,)}})) != repr(
        Replayed({0: {1: (6,)}})
    )
    settings = {name: value for name, value in SETTINGS.items() if name != "progress"}
    about = {"logprob_nats": {}, "is_replayed": True, "drafts": own.record(), "drafted_requests": [0]}
    request = cp.Request(PROMPTS[4], forced_token_ids=tuple(answer))
    stream = cp.stream(loaded(), request, **settings, drafter=own, capture="S", out=tmp_path / "run", replay=about)
    go_on(stream, tmp_path / "run", 3)
    stream.close()
    resumed = cp.resume(tmp_path / "run", loaded(), progress=False)
    response = {"prompt_token_ids": PROMPTS[4], "token_ids": answer, "drafts": list(drafts.items())}
    whole = cp.replay(loaded(), response, **SETTINGS, capture="S")
    assert resumed.committed(0) == answer and resumed.meta["replay"] == whole.meta["replay"]
    assert resumed.rows().token_id.tolist() == whole.rows().token_id.tolist()


def test_settings_of_sampling_are_unknown_here() -> None:
    for name, value in (("sampling", cp.SamplingParams()), ("max_new_tokens", 3), ("seed", 1)):
        with pytest.raises(TypeError, match=name):
            cp.replay(loaded(), plain(), **SETTINGS, **{name: value})


def test_a_rejection_of_forced_tokens_cannot_be_flipped() -> None:
    trace = cp.replay(loaded(), plain(), **SETTINGS, drafter=cp.drafters.EarlyExit(layer=1))
    line = trace.rejected().iloc[0]
    with pytest.raises(ValueError, match="were forced"):
        cp.analysis.flip(trace, line.request_id, line.step)


@pytest.mark.parametrize("acceptance", ["equality", "rejection"])
def test_neither_sampling_nor_stop_tokens_change_a_replay(acceptance: str) -> None:
    requests = [cp.Request(p, forced_token_ids=tuple(a)) for p, a in zip(PROMPTS, ANSWERS, strict=True)]
    sampling = cp.SamplingParams(temperature=1.0, stop_token_ids=tuple(range(VOCAB)), max_new_tokens=3)
    drafter = cp.drafters.EarlyExit(layer=1)
    trace = cp.run(loaded(), requests, **SETTINGS, sampling=sampling, drafter=drafter, acceptance=acceptance)
    assert [trace.committed(i) for i in range(5)] == ANSWERS


def test_forced_tokens_are_checked() -> None:
    with pytest.raises(ValueError, match="samples nothing"):
        cp.Request([1], forced_token_ids=(1,), sampling=cp.SamplingParams(temperature=1.0))
    with pytest.raises(ValueError, match="request 0: forced token 999999 is outside the vocabulary"):
        cp.run(loaded(), cp.Request([1], forced_token_ids=(999_999,)), **SETTINGS)
    with pytest.raises(ValueError, match="made with cp.replay|make it with cp.replay"):
        cp.analysis.engine_differences(cp.run(loaded(), [[1, 2]], **SETTINGS, max_new_tokens=2))


def test_a_forced_choice_is_made_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red: an engine that chooses freely fails the first test's comparison of tokens."""
    chosen = committer.choose_next
    monkeypatch.setattr(
        "cacheprobe.engine.committer.choose_next",
        lambda state, logits, drafted, position, top_choice=None, is_draft=False: chosen(
            state, logits, drafted, position, top_choice, is_draft=True
        ),
    )
    trace = cp.replay(loaded(), plain(), window=1, group=2, capacity=96, progress=False, drafter=None)
    assert trace.committed(0)[0] != ANSWERS[0][0]


# -- texts, with a real tokenizer


@pytest.fixture(scope="module")
def real() -> CachedLM:
    return cp.load_model("smollm2-135m", progress=False)


def test_a_text_is_replayed(real: CachedLM) -> None:
    prompt, text = "A coin's state is heads. Alice flips.", " The coin is tails."
    trace = cp.replay(real, text, prompts=prompt, capture="S", capacity=64, progress=False)
    assert trace.text(0) == text
    ids = real.encode(prompt + text)
    assert [*trace.requests[0].prompt_token_ids, *trace.committed(0)] == list(ids)
    names = [real.decode([token]) for token in trace.committed(0)]
    chat = {"choices": [{"message": {"content": text}, "logprobs": {"content": [
        {"token": name, "logprob": nats} for name, nats in zip(names, trace.logprobs(0), strict=True)
    ]}}]}  # fmt: skip
    again = cp.replay(real, chat, prompts=prompt, capture="S", capacity=64, progress=False)
    assert again.committed(0) == trace.committed(0)
    assert cp.analysis.engine_differences(again).difference_nats.abs().max() < 1e-6
    chat["choices"][0]["logprobs"]["content"][1]["token"] = " dog"
    with pytest.raises(ReplayRefused, match="other tokens here from token 1 on"):
        cp.replay(real, chat, prompts=prompt, progress=False)
    with pytest.raises(ReplayRefused, match="at the seam"):
        cp.replay(real, "s are many", prompts="The dog", progress=False)
    with pytest.raises(ReplayRefused, match="response 0 does not hold its prompt"):
        cp.replay(real, text, progress=False)


def test_other_prompt_tokens_are_refused(real: CachedLM) -> None:
    response = {"prompt_token_ids": [1, 2, 3], "token_ids": [4]}
    with pytest.raises(ReplayRefused, match="the other program read 3; they differ from token 0 on"):
        cp.replay(real, response, prompts="Hello", progress=False)
    with pytest.raises(ReplayRefused, match="2 prompts for 1 responses"):
        cp.replay(real, response, prompts=["a", "b"], progress=False)
