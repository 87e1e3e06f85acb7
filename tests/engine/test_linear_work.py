"""Work grows in proportion to a run: executed lines of cacheprobe are counted, and no seconds.

A cost that grows faster once hid in the engine: every round looked through all waiting requests, every shared prompt
through all rows of the run, every streamed token through the whole text, and every vote of NGram through all
occurrences of a token. The increase of lines from 2n to 4n would be four times that from n to 2n; it must be double.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest

import cacheprobe as cp
from cacheprobe.core import tokens as token_text
from cacheprobe.core.config import EngineConfig
from cacheprobe.engine.scheduler import Scheduler
from cacheprobe.kvcache.sequence import SequenceState
from tests import request_checks
from tests.drafters.test_drafters import Context
from tests.tiny import VOCAB, loaded

PACKAGE = str(Path(cp.__file__).parent)
DOUBLE = 2.15
"""Most that the second increase may be of the first; batches of 4 requests do not always fill."""


@contextmanager
def counting_lines(within: str) -> Iterator[Callable[[], int]]:
    """Yields a function that returns how many lines of cacheprobe, or of its file `within`, have run in the body so
    far. A line counts each time that it runs; a comprehension counts one for each item."""
    count = 0

    def on_line(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return on_line

    before = sys.gettrace()
    sys.settrace(
        lambda frame, event, arg: on_line if frame.f_code.co_filename.startswith(f"{PACKAGE}/{within}") else None
    )
    try:
        with patch.object(request_checks, "IS_ON", False):  # the checks of tests look at all requests
            yield lambda: count
    finally:
        sys.settrace(before)


def lines_of(job: Callable[[int], object], size: int, within: str) -> int:
    """Returns how many lines the job runs at a size."""
    with counting_lines(within) as count:
        job(size)
    return count()


def increase_ratio(job: Callable[[int], object], size: int, within: str = "") -> float:
    """Returns the increase of lines from 2 `size` to 4 `size` over that from `size` to 2 `size`: 2 for linear work, 4
    for quadratic."""
    for n in (1, 2, 4, 4, 2, 1, 1, 2, 4):  # what is built once, the trials of pass shapes, and the tapes
        job(n * size)
    one, two, four = (lines_of(job, n * size, within) for n in (1, 2, 4))
    assert one > 0, f"no line of {within} ran"
    return (four - two) / (two - one)


def settings(new_tokens: int, **others: Any) -> dict[str, Any]:
    sampling = cp.SamplingParams(stop_token_ids=(), max_new_tokens=new_tokens)
    return dict(sampling=sampling, capacity=64, max_batch=4, progress=False, **others)


def differing(count: int) -> list[list[int]]:
    """Returns prompts of three tokens of which no two are equal."""
    return [[1, n % VOCAB, n // VOCAB] for n in range(count)]


def test_requests_that_wait() -> None:
    ratio = increase_ratio(lambda n: cp.run(loaded(), differing(n), **settings(2)), 12)
    assert 1.8 < ratio < DOUBLE


def test_requests_that_wait_for_the_verifier() -> None:
    shapes = dict(deterministic=True, window=4, group=4)
    ratio = increase_ratio(lambda n: cp.run(loaded(), differing(n), **settings(3, **shapes)), 12)
    assert 1.8 < ratio < DOUBLE


def test_requests_with_one_prompt() -> None:
    """Each copies the rows of one that was read, and the lens reads the prompt's last row again."""
    ratio = increase_ratio(
        lambda n: cp.run(loaded(), [[1, 2, 3]] * n, **settings(2)), 12, "trace/recording/recorder.py"
    )
    assert 1.8 < ratio < DOUBLE


@pytest.mark.parametrize(
    ("file", "prompts"),
    [("", differing), ("engine/step.py", lambda n: [[1, 2, 3]] * n), ("trace/tables/build.py", differing)],
)
def test_requests_in_one_batch(file: str, prompts: Callable[[int], list[list[int]]]) -> None:
    """Up to 32 requests in one pass: none looks for its prompt, or for its margins, among those of all others."""
    shapes = {**settings(2, deterministic=True, window=4, group=32), "max_batch": 64}
    ratio = increase_ratio(lambda n: cp.run(loaded(), prompts(n), **shapes), 8, file)
    assert ratio < DOUBLE


def test_a_prompt_is_read_once() -> None:
    prompt = [n % VOCAB for n in range(512)]
    shapes = {**settings(1), "capacity": 1152}
    ratio = increase_ratio(lambda n: cp.run(loaded(), [prompt[:n]], **shapes), 128)
    assert 1.8 < ratio < DOUBLE


def test_tokens_that_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of tokens that are decoded: of a window for each piece, and once of the whole at the end."""
    monkeypatch.setattr(token_text, "WINDOW", 8)
    decoded: list[int] = []

    def read(new_tokens: int) -> int:
        shapes = {**settings(new_tokens), "capacity": 1152}
        del shapes["progress"]
        stream = cp.stream(loaded(), [[1, 2, 3]], **shapes)
        decode = stream._decode
        stream._decode = lambda token_ids, after: (decoded.append(len(token_ids)), decode(token_ids, after))[1]
        decoded.clear()
        text = "".join(piece.text for piece in stream)
        assert text == stream.trace().text(0)
        return sum(decoded)

    one, two, four = (read(n) for n in (32, 64, 128))
    assert 1.8 < (four - two) / (two - one) < DOUBLE


def test_a_vote_of_ngram() -> None:
    """A text of two tokens, in which half of all tokens are occurrences of the newest one."""
    text = [int(n * n % 7 < 3) for n in range(256)]

    def draft_all(length: int) -> None:
        request = cp.Request((), prompt_token_ids=tuple(text[:4]), request_id=0)
        sampling = cp.SamplingParams(stop_token_ids=(), stop=(), max_new_tokens=4096)
        state, drafter = SequenceState(request, True, sampling), cp.drafters.NGram()
        for token in text[4:length]:
            assert drafter.extend(Context(), [state])
            state.token_ids.append(token)

    assert 1.8 < increase_ratio(draft_all, 64) < DOUBLE


def test_only_a_cancelled_request_makes_a_round_look_at_the_queue() -> None:
    """Without one, no round reads whether a request is to be cancelled; with one, a single round reads it."""
    reads = 0
    real = SequenceState.is_cancel_requested

    def is_requested(self: SequenceState) -> bool:
        nonlocal reads
        reads += 1
        return real.fget(self)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(SequenceState, "is_cancel_requested", property(is_requested, real.fset))
        stream = cp.stream(loaded(), differing(40), **{k: v for k, v in settings(2).items() if k != "progress"})
        next(stream)
        after_first = reads
        for _ in range(10):
            next(stream)
        assert reads == after_first <= 40  # the scheduler's own look, before the first round
        stream.cancel(39)
        stream.cancel(20)
        ends = {piece.request_id: piece.finish for piece in stream}
        assert reads <= after_first + 2 * 40
    assert ends[39] == ends[20] == "cancelled" and set(ends.values()) == {"cancelled", "length"}


def test_cancelled_requests_keep_the_order_of_the_queue() -> None:
    sampling = cp.SamplingParams(stop_token_ids=(), stop=())
    requests = [cp.Request((), prompt_token_ids=(1,), request_id=n) for n in range(6)]
    states = [SequenceState(request, False, sampling) for request in requests]
    config = EngineConfig(capacity=64)
    scheduler = Scheduler(states, loaded().new_cache(2, 64), config)  # it admits none here
    for n in (4, 1):
        states[n].is_cancel_requested = True
    assert [state.request_id for state in scheduler.cancelled()] == [1, 4]
    assert [state.request_id for state in scheduler.waiting] == [0, 2, 3, 5]
