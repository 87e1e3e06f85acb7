"""Committed tokens as they come: nothing unverified leaves, and no character is cut in two."""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

from cacheprobe.cache.sequence import SequenceState
from cacheprobe.observe.observers import Silent
from cacheprobe.observe.trace import Trace
from cacheprobe.records import Finished, Observer

_CUT = "\ufffd"
"""What a tokenizer gives for bytes that are no whole character yet."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one request said since the last piece."""

    request_id: int
    token_ids: tuple[int, ...]
    text: str
    """May lag behind the tokens where a character is not whole yet; never says what it would take back."""
    finish: str | None = None
    """"stop", "length", "cancelled" or "error" with the request's last piece."""
    error: str | None = None


class Stream(Silent):
    """An iterator of `Piece`s. Rounds of the engine run as pieces are asked for; leaving it early ends the run."""

    def __init__(
        self,
        states: Sequence[SequenceState],
        decode: Callable[[Sequence[int]], str],
        begin: Callable[[Observer], Iterator[int]],
    ) -> None:
        self._states = {state.request_id: state for state in states}
        self._decode = decode
        self._said: dict[int, list[int]] = {request_id: [] for request_id in self._states}
        self._fresh: dict[int, list[int]] = {}
        self._shown: dict[int, str] = dict.fromkeys(self._states, "")
        self._ended: dict[int, str] = {}
        self._trace: Trace | None = None
        self._pieces = self._run(begin(self))

    def __repr__(self) -> str:
        return f"Stream({len(self._states)} requests, {sum(map(len, self._said.values()))} tokens so far)"

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        return next(self._pieces)

    def close(self) -> None:
        """Leave the run where it stands; the model's hooks are removed."""
        self._pieces.close()

    def cancel(self, request_id: int) -> None:
        """End a request at the next round: its draft is rolled back, what was handed over stays."""
        if request_id not in self._states:
            raise KeyError(f"no request {request_id} in this stream; it has 0 to {len(self._states) - 1}")
        self._states[request_id].is_cancelled = True

    def trace(self) -> Trace:
        """The whole run's trace. Raises: RuntimeError while pieces are still to come."""
        if self._trace is None:
            raise RuntimeError("the stream has not ended; take all of its pieces first")
        return self._trace

    # -- the engine's side

    def on_commit(self, request_id: int, step: int, start: int, token_ids: Sequence[int], roles: Sequence[str]) -> None:
        self._fresh.setdefault(request_id, []).extend(token_ids)

    def on_finish(self, finished: Finished) -> None:
        self._ended[finished.request_id] = finished.reason

    def _run(self, steps: Iterator[int]) -> Generator[Piece, None, None]:
        try:
            while True:
                try:
                    next(steps)
                except StopIteration as end:
                    self._trace = end.value
                    return
                yield from self._take()
        finally:
            if isinstance(steps, Generator):
                steps.close()

    def _take(self) -> Iterator[Piece]:
        fresh, ended = self._fresh, self._ended
        self._fresh, self._ended = {}, {}
        for request_id in sorted({*fresh, *ended}):
            token_ids = fresh.get(request_id, [])
            self._said[request_id].extend(token_ids)
            text = self._new_text(request_id, is_over=request_id in ended)
            error = self._states[request_id].error
            yield Piece(request_id, tuple(token_ids), text, ended.get(request_id), error)

    def _new_text(self, request_id: int, is_over: bool) -> str:
        """What can be shown for good: up to the first character that later bytes may still complete."""
        whole, shown = self._decode(self._said[request_id]), self._shown[request_id]
        if not is_over:
            whole = whole.rstrip(_CUT)
        if not whole.startswith(shown):
            return ""
        self._shown[request_id] = whole
        return whole[len(shown) :]
