"""Streams committed tokens: unverified tokens are never handed out, and no character is cut in two."""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

from cacheprobe.core.records import Finished, Observer
from cacheprobe.core.values import HintsAtNewNames
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.kvcache.surgery import KVSnapshot
from cacheprobe.trace.trace import Trace

_CUT = "\ufffd"
"""Character that a tokenizer returns for an incomplete UTF-8 sequence."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens and text that one request has committed since its previous piece."""

    request_id: int
    token_ids: tuple[int, ...]
    text: str
    """May lag behind the tokens while a character is incomplete; text that was handed out never changes."""
    finish: str | None = None
    """"stop", "length", "cancelled" or "error" in the request's last piece."""
    error: str | None = None


class _Committed(Observer):
    """Collects committed tokens and ends since the last pieces.

    The engine refers to this object and not to the Stream, so that a Stream without references ends its run at once.
    """

    def __init__(self) -> None:
        self.fresh: dict[int, list[int]] = {}
        self.ended: dict[int, str] = {}

    def on_commit(self, request_id: int, step: int, start: int, token_ids: Sequence[int], roles: Sequence[str]) -> None:
        """Adds the committed tokens."""
        self.fresh.setdefault(request_id, []).extend(token_ids)

    def on_finish(self, finished: Finished) -> None:
        """Keeps the reason of the end."""
        self.ended[finished.request_id] = finished.reason


class Stream(HintsAtNewNames):
    """An iterator of `Piece`s. The engine runs only while the caller waits for a piece; leaving the loop early ends the
    run.
    """

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
        self._committed = _Committed()
        self._steps = begin(self._committed)

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
        """Stops the run at its current step."""
        self._ready.clear()
        if isinstance(self._steps, Generator):
            self._steps.close()

    def cancel(self, request_id: int) -> None:
        """Ends a request at the next round: its draft is rolled back; tokens that were handed out stay."""
        self._require(request_id)
        self._states[request_id].is_cancel_requested = True

    def kv_snapshot(self, request_id: int) -> KVSnapshot:
        """Returns a copy of a request's cache rows between two rounds.

        The copy holds all committed tokens but the newest; that may be more than was handed out yet. `cp.run(model,
        cp.Request(text, cached=rows))` continues from the copy; `text` is the rows' `token_ids` and at least one token
        more.
        Raises: ValueError while the request waits, and after its end unless its Request says keep_kv=True.
        """
        self._require(request_id)
        state = self._states[request_id]
        return state.snapshot() if state.kept_rows is None else state.kept_rows

    def trace(self) -> Trace:
        """Returns the trace of the whole run. Raises: RuntimeError while pieces are still to come."""
        if self._trace is None:
            raise RuntimeError("the stream has not ended; take all of its pieces first")
        return self._trace

    def _require(self, request_id: int) -> None:
        if request_id not in self._states:
            raise KeyError(f"no request {request_id} in this stream; it has 0 to {len(self._states) - 1}")

    def _take(self) -> Iterator[Piece]:
        fresh, ended = self._committed.fresh, self._committed.ended
        self._committed.fresh, self._committed.ended = {}, {}
        for request_id in sorted({*fresh, *ended}):
            token_ids = fresh.get(request_id, [])
            self._said[request_id].extend(token_ids)
            text = self._new_text(request_id, is_over=request_id in ended)
            error = self._states[request_id].error
            yield Piece(request_id, tuple(token_ids), text, ended.get(request_id), error)

    def _new_text(self, request_id: int, is_over: bool) -> str:
        """Returns the new text up to the first character that later bytes may still complete."""
        whole, shown = self._decode(self._said[request_id]), self._shown[request_id]
        if not is_over:
            whole = whole.rstrip(_CUT)
        if not whole.startswith(shown):
            return ""
        self._shown[request_id] = whole
        return whole[len(shown) :]
