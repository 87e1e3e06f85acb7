"""Defines Pass: one forward pass, which the engine builds, the model computes, and checker and observer read."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cacheprobe.core.records import EngineError as EngineError
from cacheprobe.core.records import RowSlot
from cacheprobe.edits.interventions.editor import TokenSlot, token_phase
from cacheprobe.kvcache.cache import KVCache
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.kvcache.staged import DuplicateEntry, PassAttention
from cacheprobe.ops.attention import AttentionSpans, SlotSpan, spans_of
from cacheprobe.ops.compiled.attention import serves_tokens_of

PAD_TOKEN_ID = 0
"""Token id that pads and dummies feed. Its value has no effect, because no real token attends to them."""


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


@dataclass(eq=False)
class Pass:
    """Holds one forward pass: its entries, their places in the batch and in the cache, and which tokens are computed
    twice. Dummies fill the batch, and pads each entry up to `width` tokens."""

    cache: KVCache = field(repr=False)
    step: int
    phase: str
    entries: Sequence[Entry]
    width: int
    batch: int | None = None
    """Fixed number of batch indices; attention then runs over the whole capacity, or request by request over slots that
    the request's positions determine. None: one batch index for each entry, with attention over the slots in use, or
    request by request if compiled loops compute it."""
    num_layers: int | None = None
    """As for CachedLM.forward; `logit_slots` likewise."""
    logit_slots: Sequence[int] | None = None
    is_rebuild: bool = False
    """The pass rebuilds a preempted request, so its rows and thoughts are not reported again."""
    is_without_pads: bool = False
    """Attention runs over the tokens of each entry as in a pass by itself, without pads."""
    num_before: int = 0
    """Number of dummies before the first entry; the others stand behind the last one."""
    duplicate: DuplicateEntry | None = None
    """The last batch index, if it computes the tokens of another one again."""
    recomputed: int | None = None
    """Index in `entries` of the request that a pass of its own computes again; None for no request."""

    best: Tensor | None = None
    """After the pass, `top_two` of each row of its logits, on the CPU; None if the logits are on the CPU, or if it has
    none."""

    def __post_init__(self) -> None:
        size = len(self.entries) if self.batch is None else self.batch
        longest = max(len(entry.token_ids) for entry in self.entries)
        spare, num_behind = free_row(self.cache), size - len(self.entries) - self.num_before
        is_short_of_rows = spare is None and size > len(self.entries)
        if num_behind < 0 or is_short_of_rows or longest > self.width:
            raise EngineError(
                f"step {self.step}: {len(self.entries)} requests of up to {longest} tokens do not fit a {self.phase} "
                f"pass of {size} x {self.width}"
            )
        dummy = -1 if spare is None else spare
        taken = [entry.state.cache_row for entry in self.entries]
        self.cache_rows = [*[dummy] * self.num_before, *taken, *[dummy] * num_behind]
        self.batch_index = tuple(range(self.num_before, self.num_before + len(taken)))
        self.starts = [0] * size
        self.token_ids = torch.full((size, self.width), PAD_TOKEN_ID, dtype=torch.long)
        for b, entry in zip(self.batch_index, self.entries, strict=True):
            self.starts[b] = entry.start
            self.token_ids[b, : len(entry.token_ids)] = torch.tensor(entry.token_ids)

    @property
    def shape(self) -> tuple[int, int]:
        """(batch size, token slots) of the pass, dummies and pads included."""
        return len(self.cache_rows), self.width

    @property
    def is_compared(self) -> bool:
        """Whether tokens of the pass are computed twice."""
        return self.duplicate is not None or self.recomputed is not None

    def attention(self, attends_by_request: bool) -> PassAttention:
        """Returns over which cache slots attention runs: request by request, whatever the other requests are, if the
        model can and the shape is fixed or the loops compute one token of each."""
        is_fixed = self.batch is not None
        if not attends_by_request or not (is_fixed or (self.width == 1 and serves_tokens_of(self.cache.keys[0]))):
            return PassAttention(None if is_fixed else max(self.starts) + self.width, None, self.duplicate)
        spans: list[tuple[SlotSpan, ...]] = [()] * len(self.cache_rows)
        capacity = self.cache.capacity
        for b, entry in zip(self.batch_index, self.entries, strict=True):
            count = len(entry.token_ids)
            of = spans_of(self.phase, count if self.is_without_pads else self.width)
            spans[b] = of(entry.start, count, capacity)
        if (twice := self.duplicate) is not None:
            of = spans_of(self.phase, self.width)
            spans[twice.copy] = of(self.starts[twice.copy], twice.shift + twice.num_tokens, capacity)
        is_apart = self.is_without_pads and len(spans) > 1
        return PassAttention(None, AttentionSpans(tuple(spans), is_apart), self.duplicate)

    def row_slots(self) -> tuple[RowSlot, ...]:
        """Returns a RowSlot for each real token, entry by entry, for the observer."""
        return tuple(
            RowSlot(
                entry.state.request_id,
                b,
                t,
                entry.start + t,
                token_id,
                entry.is_canonical,
                t >= len(entry.token_ids) - entry.num_drafts,
            )
            for b, entry in zip(self.batch_index, self.entries, strict=True)
            for t, token_id in enumerate(entry.token_ids)
        )

    def token_slots(self) -> list[TokenSlot]:
        """Returns a TokenSlot for each real token, in the order of `row_slots`, for the editor of interventions."""
        return [
            TokenSlot(
                entry.state.request_id, b, t, at, token_phase(entry.state, at, self.phase), token, self.is_rebuild
            )
            for b, entry in zip(self.batch_index, self.entries, strict=True)
            for t, (at, token) in enumerate(enumerate(entry.token_ids, entry.start))
        ]


def free_row(cache: KVCache) -> int | None:
    """Returns the lowest cache row that no request uses, for the dummies of a pass; None if all are taken."""
    return next((row for row in range(cache.rows) if cache.is_free(row)), None)
