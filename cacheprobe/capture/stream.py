"""Committed tokens as they come: nothing unverified leaves, and no character is cut in two."""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

from cacheprobe.capture.observers import Silent
from cacheprobe.core.records import Finished, Observer
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.kvcache.surgery import KVSnapshot
from cacheprobe.trace.trace import Trace

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


class _Heard(Silent):
    """What was committed and who ended since the last pieces. The engine holds this, and never the stream itself: a
    stream that is let go ends its run at once."""

    def __init__(self) -> None:
        self.fresh: dict[int, list[int]] = {}
        self.ended: dict[int, str] = {}

    def on_commit(self, request_id: int, step: int, start: int, token_ids: Sequence[int], roles: Sequence[str]) -> None:
        self.fresh.setdefault(request_id, []).extend(token_ids)

    def on_finish(self, finished: Finished) -> None:
        self.ended[finished.request_id] = finished.reason


class Stream:
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
        self._shown: dict[int, str] = dict.fromkeys(self._states, "")
        self._trace: Trace | None = None
        self._ready: deque[Piece] = deque()
        self._heard = _Heard()
        self._steps = begin(self._heard)

    def __repr__(self) -> str:
        return f"Stream({len(self._states)} requests, {sum(map(len, self._said.values()))} tokens so far)"

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        while not self._ready:
            try:
                next(self._steps)
            except StopIteration as end:
                self._trace = self._trace or end.value
                raise StopIteration from None
            self._ready.extend(self._take())
        return self._ready.popleft()

    def close(self) -> None:
        """Leave the run where it stands."""
        self._ready.clear()
        if isinstance(self._steps, Generator):
            self._steps.close()

    def cancel(self, request_id: int) -> None:
        """End a request at the next round: its draft is rolled back, what was handed over stays."""
        self._require(request_id)
        self._states[request_id].is_cancelled = True

    def cache_rows(self, request_id: int) -> KVSnapshot:
        """A copy of a request's cache rows as they stand between two rounds: of all tokens committed to it but the
        newest, which may be more than were handed over yet. `cp.run(model, cp.Request(text, cached=rows))` goes on
        from them, `text` being the rows' `token_ids` and at least one token more.

        Raises: ValueError while it waits, and after its end unless its Request says keep_rows=True.
        """
        self._require(request_id)
        state = self._states[request_id]
        return state.snapshot() if state.kept_rows is None else state.kept_rows

    def trace(self) -> Trace:
        """The whole run's trace. Raises: RuntimeError while pieces are still to come."""
        if self._trace is None:
            raise RuntimeError("the stream has not ended; take all of its pieces first")
        return self._trace

    def _require(self, request_id: int) -> None:
        if request_id not in self._states:
            raise KeyError(f"no request {request_id} in this stream; it has 0 to {len(self._states) - 1}")

    def _take(self) -> Iterator[Piece]:
        fresh, ended = self._heard.fresh, self._heard.ended
        self._heard.fresh, self._heard.ended = {}, {}
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
