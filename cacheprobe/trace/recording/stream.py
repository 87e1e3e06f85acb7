"""Defines Stream, which yields committed tokens during a run, but no draft token and no incomplete character."""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field

from cacheprobe.core.records import Finished, Observer
from cacheprobe.core.tokens import CUT, WINDOW, TextWindow
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.kvcache.surgery import KVSnapshot
from cacheprobe.trace.trace import Trace


@dataclass(frozen=True, slots=True)
class Piece:
    """Holds the tokens, and their text, that one request has committed since its previous piece."""

    request_id: int
    token_ids: tuple[int, ...]
    text: str
    """New text. Waits for later tokens while a character is incomplete; text of earlier pieces never changes."""
    finish: str | None = None
    """"stop", "length", "cancelled" or "error" in the request's last piece."""
    error: str | None = None
    """Message of the error that the request ended with."""


@dataclass
class _Text:
    """Holds one request's committed tokens, and the text that its pieces have given so far."""

    prompt: tuple[int, ...]
    token_ids: list[int] = field(default_factory=list)
    given: list[str] = field(default_factory=list)
    """The text of each piece."""
    first: int = 0
    """Index of the first token of the window, the newest tokens."""
    window: str = ""
    """Text of the window that the pieces have given."""


class _Committed(Observer):
    """Collects the tokens committed, and the requests ended, since the last pieces were built."""

    def __init__(self) -> None:
        self.fresh: dict[int, list[int]] = {}
        self.ended: dict[int, str] = {}

    def on_commit(self, request_id: int, step: int, start: int, token_ids: Sequence[int], roles: Sequence[str]) -> None:
        """Appends the committed tokens to `fresh`, by request."""
        self.fresh.setdefault(request_id, []).extend(token_ids)

    def on_finish(self, finished: Finished) -> None:
        """Stores the reason of a request's end in `ended`, by request."""
        self.ended[finished.request_id] = finished.reason


class Stream:
    """Iterates over the `Piece`s of a run: committed tokens and their text.

    The engine runs only while the caller waits for a piece. `close` ends the run early; so does the deletion of the
    last reference to the Stream.
    """

    def __init__(
        self,
        states: Sequence[SequenceState],
        decode: Callable[[Sequence[int], Sequence[int]], str],
        begin: Callable[[Observer], Iterator[int]],
    ) -> None:
        self._states = {state.request_id: state for state in states}
        self._decode = decode
        self._window = TextWindow(lambda token_ids: decode(token_ids, ()))
        self._texts = {i: _Text(state.request.prompt_token_ids) for i, state in self._states.items()}
        self._trace: Trace | None = None
        self._ready: deque[Piece] = deque()
        self._committed = _Committed()
        self._steps = begin(self._committed)

    def __repr__(self) -> str:
        num_tokens = sum(len(text.token_ids) for text in self._texts.values())
        return f"Stream({len(self._states)} requests, {num_tokens} tokens so far)"

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        while not self._ready:
            try:
                next(self._steps)
            except StopIteration as end:
                self._trace = end.value if self._trace is None else self._trace
                raise StopIteration from None
            self._ready.extend(self._new_pieces())
        return self._ready.popleft()

    def close(self) -> None:
        """Ends the run, which waits between two steps. Pieces that were not taken are lost."""
        self._ready.clear()
        if isinstance(self._steps, Generator):
            self._steps.close()

    def cancel(self, request_id: int) -> None:
        """Asks a request to end at the next round of the run. Its draft is abandoned; its committed tokens stay.
        Raises: KeyError for an unknown request."""
        self._require(request_id)
        self._states[request_id].is_cancel_requested = True

    def kv_snapshot(self, request_id: int) -> KVSnapshot:
        """Returns a KVSnapshot: a copy of a request's keys and values, of the prompt and all committed tokens but the
        newest.

        The copy may hold tokens that are in no piece yet. `cp.run(model, cp.Request(prompt, cached=snapshot))`
        continues from it; `prompt` begins with the snapshot's `token_ids` and has at least one token more.
        Raises: ValueError while the request has no complete cache row (it waits, was preempted or has failed), and
        after its end without keep_kv=True or without a generated token; KeyError for an unknown request.
        """
        self._require(request_id)
        state = self._states[request_id]
        return state.snapshot() if state.kept_rows is None else state.kept_rows

    def trace(self) -> Trace:
        """Returns the Trace of the whole run. Raises: RuntimeError before the iteration over the pieces has ended, and
        after `close` ended the run early."""
        if self._trace is None:
            raise RuntimeError("the stream has not ended; take all of its pieces first")
        return self._trace

    def _require(self, request_id: int) -> None:
        """Raises: KeyError if the stream has no request with this id."""
        if request_id not in self._states:
            raise KeyError(f"no request {request_id} in this stream; it has 0 to {len(self._states) - 1}")

    def _new_pieces(self) -> Iterator[Piece]:
        """Yields a Piece for each request that has committed tokens or ended since the last call."""
        fresh, ended = self._committed.fresh, self._committed.ended
        self._committed.fresh, self._committed.ended = {}, {}
        for request_id in sorted({*fresh, *ended}):
            token_ids = fresh.get(request_id, [])
            self._texts[request_id].token_ids.extend(token_ids)
            text = self._new_text(self._texts[request_id], is_over=request_id in ended)
            error = self._states[request_id].error
            yield Piece(request_id, tuple(token_ids), text, ended.get(request_id), error)

    def _new_text(self, text: _Text, is_over: bool) -> str:
        """Returns a request's text since the last call, without an incomplete character at its end; "" if the new
        tokens change how earlier ones decode.

        Decodes a window of the newest tokens, so that a long text takes no longer per token than a short one. At the
        end decodes all of them once, so that the pieces add up to the text of the whole.
        is_over: the request has ended, so an incomplete character is returned as it is.
        """
        if is_over:
            whole, known = self._decode(text.token_ids, text.prompt), "".join(text.given)
            text.given.append(whole[len(known) :] if whole.startswith(known) else "")
            return text.given[-1]
        whole, known = self._text_from(text, text.first), text.window
        if not whole.startswith(known):
            return ""
        text.given.append(whole[len(known) :])
        text.window = whole
        if (first := self._window.start(text.token_ids)) > text.first:
            window = self._text_from(text, first)
            if text.window.endswith(window):
                text.first, text.window = first, window
        return text.given[-1]

    def _text_from(self, text: _Text, first: int) -> str:
        """Returns the text of a request's tokens from index `first` on, without an incomplete character at its end."""
        before = text.token_ids[max(first - WINDOW, 0) : first] or text.prompt
        return self._decode(text.token_ids[first:], before).rstrip(CUT)
