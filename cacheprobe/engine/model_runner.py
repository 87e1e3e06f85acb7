"""Runs one forward pass of the engine: adds pads and dummies, and reports the pass to the observer.

Returns logits, and commits no token. A pass that fails raises an EngineError.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from cacheprobe.core.records import ForwardRecord, Observer, RowSlot, Thought
from cacheprobe.edits.interventions.editor import Editor, TokenSlot, token_phase
from cacheprobe.engine.choosing import Choice, likeliest_choices
from cacheprobe.engine.watch import Difference, Place, Watch
from cacheprobe.kvcache.cache import Copy, KVCache
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.models.base import CachedLM
from cacheprobe.ops.attention import Reach, SlotSpan, reach_of
from cacheprobe.ops.compiled.attention import serves_tokens_of

PAD_TOKEN_ID = 0
"""Token id that pads and dummies feed. Its value has no effect, because no real token attends to them."""

_CPU_REFUSAL = "can't allocate memory"
"""Text of the RuntimeError that torch raises if the CPU's memory is used up; this error has no class of its own."""


class EngineError(RuntimeError):
    """Raised if a pass, a choice of a token or a drafter's call failed, or if a run cannot go on. A failed step commits
    no token."""


class ShapeFault(EngineError):
    """Raised if a request's tokens were computed twice with different bits: the shape of the passes is at fault."""


class BatchedPromptFault(ShapeFault):
    """Raised if a prompt has other bits in a pass with other prompts than in one by itself."""


@dataclass(frozen=True)
class Entry:
    """Holds the tokens that one request feeds in a pass, and their positions."""

    state: SequenceState
    token_ids: tuple[int, ...]
    start: int
    """Absolute position of the first token."""
    is_canonical: bool
    """Whether the states of this pass count for the request, unless a token is rejected."""
    num_drafts: int = 0
    """How many of the last tokens are draft tokens without a verdict."""

    @property
    def end(self) -> int:
        """Absolute position after the last token."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True)
class PassOutcome:
    """Holds the output tensor of a pass, and the batch index of each Entry."""

    out: Tensor
    """What CachedLM.forward returned: logits [b, t, v], or the residual stream [b, t, m] with num_layers."""
    batch_index: tuple[int, ...]
    """Index b in `out`, for each entry of the pass."""


class ModelRunner:
    """Runs passes of the model over one cache. `step` is the number of the last step; -1 at first."""

    def __init__(
        self,
        model: CachedLM,
        cache: KVCache,
        observer: Observer,
        editor: Editor | None = None,
        watch: Watch | None = None,
        step: int = -1,
    ) -> None:
        """Prepares passes of `model` over `cache`, which are reported to `observer`.

        editor: applies interventions; `run` calls its method `aim` before each pass.
        watch: computes tokens of some passes twice and compares the bits; a new Watch by default.
        step: number of the last step that an earlier process has run; -1 for a new run.
        """
        self.model, self.cache, self.observer, self.editor = model, cache, observer, editor
        self.step = step
        self.watch = watch or Watch()
        self.seconds = 0.0
        self.shape = (0, 0)
        self.widths: Sequence[int] = ()
        """Widths, in tokens, in which a token has the same bits; invariant tokens are computed again in one of them."""

    def skip(self) -> None:
        """Counts a step without a pass of the model."""
        self.step += 1
        self.shape, self.seconds = (0, 0), 0.0

    def run(
        self,
        phase: str,
        entries: Sequence[Entry],
        width: int,
        *,
        batch: int | None = None,
        num_layers: int | None = None,
        logit_slots: Sequence[int] | None = None,
        is_hidden: bool = False,
        is_without_pads: bool = False,
    ) -> PassOutcome:
        """Runs a [batch, width] pass over the entries, filled up with pads and dummies. Returns a PassOutcome.

        batch: fixed number of batch indices; attention then runs over the whole capacity, or request by request over
        slots that the request's positions determine. None: one batch index for each entry, with attention over the
        slots in use, or request by request if compiled loops compute it.
        num_layers, logit_slots: as for CachedLM.forward.
        is_hidden: the pass rebuilds a preempted request, so its rows and thoughts are not reported again.
        is_without_pads: attention runs over the tokens of each entry as in a pass by itself, without pads.
        Raises: EngineError if the entries do not fit the shape, if dummies find no free cache row, if the model fails
        or gives NaN or infinity, or if the observer runs out of memory; ShapeFault if tokens that were computed twice
        have different bits.
        """
        self.step += 1
        longest = max(len(entry.token_ids) for entry in entries)
        size = len(entries) if batch is None else batch
        is_by_request = self.model.attends_by_request and (
            batch is not None or (width == 1 and serves_tokens_of(self.cache.keys[0]))
        )
        taken = [entry.state.cache_row for entry in entries]
        cache_rows = place_rows(taken, size, self.cache)
        if cache_rows is None or longest > width:
            raise EngineError(
                f"step {self.step}: {len(entries)} requests of up to {longest} tokens do not fit a {phase} pass of "
                f"{size} x {width}"
            )
        index = {cache_row: b for b, cache_row in enumerate(cache_rows)}
        batch_index = tuple(index[cache_row] for cache_row in taken)
        starts = [0] * size
        token_ids = torch.full((size, width), PAD_TOKEN_ID, dtype=torch.long)
        for b, entry in zip(batch_index, entries, strict=True):
            starts[b] = entry.start
            token_ids[b, : len(entry.token_ids)] = torch.tensor(entry.token_ids)
        copy = None
        states = [entry.state for entry in entries]
        if phase == "verify" and size > len(entries) and num_layers is None:
            feeds = [entry.token_ids for entry in entries]
            copy = self.watch.place_copy(self.cache, states, feeds, batch_index, cache_rows, starts, token_ids)
        again = None
        if not is_hidden and size > 1 and phase == "prefill" and is_without_pads:
            again = self.watch.choose_prompt(self.cache, states)
        elif batch is not None and phase != "prefill" and not is_hidden and any(s.is_invariant for s in states):
            again = self.watch.choose_again(self.cache, states)
        slots = tuple(row_slots(entries, batch_index))
        self.shape = (size, width)
        began = time.perf_counter()
        if not is_hidden:
            with self._recording(phase, entries):
                self.observer.before_forward(self.step, phase, slots, self.shape)
        if self.editor is not None:
            self.editor.aim(self.step, _aims(phase, entries, batch_index), is_hidden)
        reach = self._reach(phase, entries, batch_index, size, copy, is_without_pads) if is_by_request else None
        span = reach.span if reach else self.cache.capacity if batch is not None else max(starts) + width

        forward = partial(
            self.model.forward,
            token_ids,
            self.cache,
            cache_rows,
            starts,
            num_layers=num_layers,
            logit_slots=logit_slots,
        )
        try:
            with self.cache.attending_to(span, reach, copy), self.watch.comparing(copy):
                if again is None:
                    out = forward()
                else:
                    with self.watch.keeping(self.model, batch_index[again], len(entries[again].token_ids)):
                        out = forward()
                compared = out
                if again is not None:
                    compared = _own_logits(out[batch_index[again]], len(entries[again].token_ids), logit_slots)
                if (copy, again) != (None, None) and not bool(torch.isfinite(compared.amax(-1)).all()):
                    copy = again = None  # `_require_numbers` reports NaN; there are no bits to compare
                differs = None if copy is None else self.watch.difference(self.model, self.cache, copy, out, forward)
            if again is not None:
                differs = self._compute_again(phase, entries[again], batch_index[again], compared, logit_slots)
        except Exception as error:
            raise self._failed(phase, entries, error) from error
        finally:
            if self.editor is not None:
                self.editor.rest()
        if (copy, again) != (None, None):
            self.observer.on_compared(self.step, None if differs is None else str(differs))
        if differs is not None:
            fault = BatchedPromptFault if phase == "prefill" else ShapeFault
            whose = next(e for b, e in zip(batch_index, entries, strict=True) if b == differs.original)
            raise fault(differs.message(whose.state.request_id, self.step, phase, self.shape, self.model))
        if phase == "verify":
            self.watch.remember(states, batch_index, starts, out)
        with self._recording(phase, entries):
            self._require_numbers(out, entries, batch_index, range(width) if logit_slots is None else logit_slots)
        if not is_hidden:
            logits = None if num_layers is not None or logit_slots is not None else out
            rewritten = {} if self.editor is None else self.editor.rewritten
            with self._recording(phase, entries):
                self.observer.after_forward(ForwardRecord(self.step, phase, slots, logits, num_layers, rewritten))
        self._report_thoughts(phase, entries, is_hidden)
        self.seconds = time.perf_counter() - began
        return PassOutcome(out, batch_index)

    def _compute_again(
        self, phase: str, entry: Entry, original: int, logits: Tensor, logit_slots: Sequence[int] | None
    ) -> Difference | None:
        """Computes the tokens of one entry of the pass just run a second time: alone, or if it was alone, behind two
        dummies; and in one of the `widths`, or without pads if they are a prompt's. Returns the first Difference, or
        None.

        original: the entry's batch index in the pass just run.  logits: [n, v] of it, see `_own_logits`.
        """
        count, taken = len(entry.token_ids), entry.state.cache_row
        fitting = [width for width in self.widths if width >= count] or [self.shape[1]]
        if phase == "prefill":
            fitting = [count]
        slots = None if logit_slots is None else [count - 1]
        width, size = fitting[self.step % len(fitting)], 1 if self.shape[0] > 1 else 3
        rows = place_rows([taken], size, self.cache) or [taken]
        rows.reverse()
        at = len(rows) - 1
        token_ids = torch.full((len(rows), width), PAD_TOKEN_ID, dtype=torch.long)
        token_ids[at, :count] = torch.tensor(entry.token_ids)
        starts = [*[0] * at, entry.start]
        reach = None
        if self.model.attends_by_request:
            reach = self._reach(phase, [entry], (at,), len(rows), None, phase == "prefill")
        if self.editor is not None:
            self.editor.rest()
        with self.cache.attending_to(reach.span if reach else self.cache.capacity, reach):
            return self.watch.difference_again(
                self.model,
                self.cache,
                Place(original, at, taken, entry.start, count),
                logits,
                lambda: self.model.forward(token_ids, self.cache, rows, starts, logit_slots=slots),
            )

    def likeliest(self, entries: Sequence[Entry], result: PassOutcome) -> list[Sequence[Choice | None]]:
        """Returns the `likeliest_choices` of the tokens that each entry fed, from the result of the pass just run.

        Raises: EngineError if memory runs out."""
        with self._recording("read", entries):
            width, of_entries = result.out.shape[1], zip(entries, result.batch_index, strict=True)
            fed = [b * width + t for entry, b in of_entries for t in range(len(entry.token_ids))]
            logits = result.out.flatten(0, 1)  # a view
            found = iter(likeliest_choices(self.model, logits if fed == [*range(len(logits))] else logits[fed]))
        return [list(islice(found, len(entry.token_ids))) for entry in entries]

    def _failed(self, phase: str, entries: Sequence[Entry], error: Exception) -> EngineError:
        """Returns an EngineError that names the pass, its requests and the error that the pass ended with."""
        names = ", ".join(str(entry.state.request_id) for entry in entries)
        batch, width = self.shape
        return EngineError(
            f"step {self.step}: the {phase} pass of requests {names}, {batch} x {width}, failed with "
            f"{type(error).__name__}: {error!s:.200}; nothing of it was committed"
        )

    @contextmanager
    def _recording(self, phase: str, entries: Sequence[Entry]) -> Iterator[None]:
        """Turns an out-of-memory error raised inside the `with` into an EngineError."""
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise self._failed(phase, entries, error) from error

    def _reach(
        self,
        phase: str,
        entries: Sequence[Entry],
        batch_index: Sequence[int],
        size: int,
        copy: Copy | None,
        is_without_pads: bool = False,
    ) -> Reach:
        """Returns a Reach: over which cache slots each token's attention runs, whatever the other requests are."""
        pieces: list[tuple[SlotSpan, ...]] = [()] * size
        for b, entry in zip(batch_index, entries, strict=True):
            count = len(entry.token_ids)
            of = reach_of(phase, count if is_without_pads else self.shape[1])
            pieces[b] = of(entry.start, count, self.cache.capacity)
        if copy is not None:
            start = next(e.start for b, e in zip(batch_index, entries, strict=True) if b == copy.original)
            of = reach_of(phase, self.shape[1])
            pieces[copy.copy] = of(start - copy.shift, copy.shift + copy.num_tokens, self.cache.capacity)
        return Reach(tuple(pieces), is_without_pads and size > 1)

    def _report_thoughts(self, phase: str, entries: Sequence[Entry], is_hidden: bool) -> None:
        """Reports the thoughts (of Thinking States) whose chunk ends in a real token; none in a pass of a rebuild."""
        by_row = {entry.state.cache_row: entry for entry in entries}
        for made in self.cache.take_thoughts():
            entry = by_row.get(made.cache_row)
            if is_hidden or entry is None or not entry.start <= made.end < entry.end:
                continue
            self.observer.on_thought(
                Thought(
                    entry.state.request_id,
                    self.step,
                    phase,
                    (made.end + 1) // len(made.state) - 1,
                    made.end,
                    made.token_ids,
                    made.has_ended,
                    made.logprobs,
                    made.first_logits,
                    made.state,
                )
            )

    def _require_numbers(
        self, out: Tensor, entries: Sequence[Entry], batch_index: Sequence[int], slots: Sequence[int]
    ) -> None:
        """Raises: EngineError if the output for a real token contains NaN, or if its maximum is infinite. slots: the
        token slots that `out` holds."""
        top = out.amax(-1).cpu()  # the largest number of each slot
        if bool(torch.isfinite(top).all()):
            return
        for entry, b in zip(entries, batch_index, strict=True):
            own = [i for i, slot in enumerate(slots) if slot < len(entry.token_ids)]
            own = own[-1:] if len(slots) < self.shape[1] else own  # of chosen slots, the entry needs only its last
            for i in own:
                if not torch.isfinite(top[b, i]):
                    raise EngineError(
                        f"request {entry.state.request_id} step {self.step}: logits for position "
                        f"{entry.start + slots[i] + 1} hold {'NaN' if torch.isnan(top[b, i]) else float(top[b, i])}; "
                        f"nothing of this step was committed; load {self.model.name} in float32 or check its weights"
                    )


def _own_logits(logits: Tensor, count: int, slots: Sequence[int] | None) -> Tensor:
    """Returns those of a batch index's logits [t, v] that belong to its `count` tokens. If the pass computed only those
    at `slots`: of its last token, [1, v], or [0, v] if that is not among them."""
    return logits[:count] if slots is None else logits[[i for i, slot in enumerate(slots) if slot == count - 1]]


def is_out_of_memory(error: BaseException | None) -> bool:
    """Returns whether an error says that Python, a GPU, or torch on the CPU could not allocate memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _CPU_REFUSAL in str(error)


def place_rows(taken: Sequence[int], size: int, cache: KVCache) -> list[int] | None:
    """Returns the cache row of each batch index: first the requests' rows `taken`; then one free row for all dummies.

    Returns None if there are more than `size` requests, or if dummies are needed and no row is free.
    """
    if len(taken) == size:
        return list(taken)
    spare = next((cache_row for cache_row in range(cache.rows) if cache.is_free(cache_row)), None)
    return None if spare is None or len(taken) > size else [*taken, *[spare] * (size - len(taken))]


def row_slots(entries: Sequence[Entry], batch_index: Sequence[int]) -> list[RowSlot]:
    """Returns a list of RowSlots for the observer: one for each real token of a pass, entry by entry."""
    return [
        RowSlot(
            entry.state.request_id,
            b,
            t,
            entry.start + t,
            token_id,
            entry.is_canonical,
            t >= len(entry.token_ids) - entry.num_drafts,
        )
        for b, entry in zip(batch_index, entries, strict=True)
        for t, token_id in enumerate(entry.token_ids)
    ]


def _aims(phase: str, entries: Sequence[Entry], batch_index: Sequence[int]) -> list[TokenSlot]:
    """Returns TokenSlots for the editor of interventions: one for each real token, in the order of `_slots`."""
    return [
        TokenSlot(e.state.request_id, b, t, e.start + t, token_phase(e.state, e.start + t, phase), e.token_ids[t])
        for b, e in zip(batch_index, entries, strict=True)
        for t in range(len(e.token_ids))
    ]
