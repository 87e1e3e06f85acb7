"""The stream: pieces as tokens are committed, whole characters, cancelling, leaving early."""

import pytest

import cacheprobe as cp
from cacheprobe.core.records import Request, SamplingParams
from tests.invariants.machines import Faulty, Spy, tiny
from tests.invariants.runs import HOT, NEW, PROMPTS, RUN, SHAPES, babbler, outcome

STREAM = dict(**SHAPES, max_new_tokens=NEW)


def collect(stream) -> tuple[dict[int, list[int]], dict[int, str], dict[int, str]]:
    """Tokens, text and finish of every request; a request that finished says no more."""
    said: dict[int, list[int]] = {}
    shown: dict[int, str] = {}
    ended: dict[int, str] = {}
    for piece in stream:
        assert piece.request_id not in ended and (piece.token_ids or piece.finish)
        said.setdefault(piece.request_id, []).extend(piece.token_ids)
        shown[piece.request_id] = shown.get(piece.request_id, "") + piece.text
        if piece.finish:
            ended[piece.request_id] = piece.finish
    return said, shown, ended


@pytest.mark.parametrize(
    ("deterministic", "drafter"), [(True, None), ([1, 3], babbler(2))], ids=["fast path", "babbler"]
)
def test_pieces_add_up_to_the_run(deterministic, drafter) -> None:
    settings = dict(sampling=HOT, deterministic=deterministic, capture="STCZ")
    stream = cp.stream(tiny(), PROMPTS, **STREAM, **settings, drafter=drafter)
    said, shown, ended = collect(stream)
    trace = stream.trace()
    run = cp.run(tiny(), PROMPTS, **RUN, **settings, drafter=babbler(2) if drafter else None)
    for i in range(5):
        assert said[i] == trace.committed(i) == run.committed(i)
        assert shown[i] == trace.text(i) and ended[i] == trace.meta["finish"][str(i)] == "length"
        assert trace.states("S", 2, i).shape == (len(PROMPTS[i]) + NEW - 1, 32)
        if deterministic is True:
            assert outcome(trace, i) == outcome(run, i)


def test_pieces_come_while_the_run_goes_on() -> None:
    """As many rounds run as the reader asks for: after the first piece, hardly any token is computed."""
    spy = Spy(tiny())
    cp.run(spy, PROMPTS, **RUN, deterministic=True, capture=None)  # also a trial of the shape
    in_all = len(spy.calls)
    spy.calls.clear()
    stream = cp.stream(spy, PROMPTS, **STREAM, deterministic=True)
    assert not spy.calls, "something ran before anyone asked"
    first = next(stream)
    assert len(first.token_ids) >= 1 and len(spy.calls) < in_all / 2
    with pytest.raises(RuntimeError, match="has not ended"):
        stream.trace()
    collect(stream)
    assert len(spy.calls) == in_all
    with pytest.raises(StopIteration):
        next(stream)


def test_cancelling_in_the_middle() -> None:
    want = cp.reference(tiny(), PROMPTS[:3], **RUN, sampling=HOT)
    stream = cp.stream(tiny(), PROMPTS[:3], **STREAM, sampling=HOT, deterministic=True, capture="STC")
    said: dict[int, list[int]] = {i: [] for i in range(3)}
    finishes = {}
    for piece in stream:
        said[piece.request_id] += piece.token_ids
        finishes[piece.request_id] = piece.finish
        if len(said[1]) > 2:
            stream.cancel(1)
    assert finishes == {0: "length", 1: "cancelled", 2: "length"}
    trace = stream.trace()
    assert [said[i] for i in (0, 2)] == [want.committed(i) for i in (0, 2)]
    assert trace.committed(1) == said[1] == want.committed(1)[: len(said[1])] and 2 < len(said[1]) < NEW
    assert len(trace.rows(1, "committed")) == len(PROMPTS[1]) + len(said[1]) - 1
    assert cp.verify(trace, tiny(), progress=False).is_equal, "what was said before the end stays true"


def test_cancelling_all_and_before_the_start() -> None:
    stream = cp.stream(tiny(), PROMPTS[:2], **STREAM, deterministic=True)
    stream.cancel(0)
    stream.cancel(1)
    pieces = list(stream)
    assert [(p.token_ids, p.text, p.finish) for p in pieces] == [((), "", "cancelled")] * 2
    assert stream.trace().committed(0) == []
    stream.cancel(0)  # too late, and no error
    with pytest.raises(KeyError, match="no request 7"):
        stream.cancel(7)


def test_an_error_ends_with_its_reason() -> None:
    stream = None

    def plan(call):
        state = stream._states[1]
        return [state.cache_row] if state.cache_row in call.rows and state.num_generated > 4 else None

    stream = cp.stream(Faulty(tiny(), plan), PROMPTS[:3], **STREAM, sampling=HOT)
    errors = {}
    ended = {}
    for piece in stream:
        if piece.finish:
            errors[piece.request_id], ended[piece.request_id] = piece.error, piece.finish
    assert ended == {0: "length", 1: "error", 2: "length"}
    assert errors[0] is errors[2] is None and "request 1" in errors[1] and "hold NaN" in errors[1]
    assert stream.trace().meta["errors"] == {"1": errors[1]}


def test_samples_and_stops_are_streamed() -> None:
    stop = cp.reference(tiny(), PROMPTS[:1], **RUN, sampling=HOT, capture=None).committed(0)[5]
    sampling = SamplingParams(temperature=HOT.temperature, seed=HOT.seed, n=3, stop_token_ids=stop)
    stream = cp.stream(tiny(), [Request(PROMPTS[0], sampling, is_deterministic=True)], **STREAM)
    said, _, ended = collect(stream)
    assert sorted(said) == [0, 1, 2] and ended[0] == "stop" and said[0][-1] == stop
    assert len({tuple(tokens[:4]) for tokens in said.values()}) == 3
