"""Computes attention request by request, so that results are batch-invariant: they do not depend on the other requests
in the batch.

A library may split one call for a whole batch among threads, so a request's sums can depend on its batch index. Here
each request is computed by itself, on its own keys, in a shape that depends only on the request's positions: in its own
torch calls, or in compiled loops (`compiled.attention`).
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from cacheprobe.core.records import CAPACITY_STEP
from cacheprobe.ops.compiled.attention import decode_attention, serves
from cacheprobe.ops.compiled.basics import COMPILER

SPAN_STEP = CAPACITY_STEP
"""Step in slots by which attention spans grow: the token at position p attends over the first ceil((p + 1) / 64) * 64
slots."""

BY_REQUEST = f"by request, spans of {SPAN_STEP}, sums in a fixed order by {COMPILER} for few tokens"
"""Text in the schedule fingerprint for the attention of this module."""

_ONE_THREAD_WORK = 2**24
"""One thread computes a request's scores up to this many multiplications: to wake a second thread would cost more
time."""

_ALIGNMENT = 64
"""In bytes. torch allocates memory at multiples of this number; a slice of a tensor may begin elsewhere."""

_thread_count = threading.Lock()
"""Lock that is taken while the number of threads is lowered: a Python thread that starts in that time would keep the
low number."""


KeysAndValues = Callable[[int, int], tuple[Tensor, Tensor]]
"""Function (batch index, span) -> that request's keys and values in its first `span` slots, [1, g, span, d] each."""


def first_slots(keys: Tensor, values: Tensor, row: int, span: int) -> tuple[Tensor, Tensor]:
    """Returns the keys and values of batch index `row` in its first `span` slots, [1, g, span, d] each, from keys and
    values [b, g, s, d]."""
    return keys[row : row + 1, :, :span], values[row : row + 1, :, :span]


@dataclass(frozen=True)
class SlotSpan:
    """Holds a range of new tokens of one request that attend over the same number of cache slots (the span)."""

    span: int
    first: int
    end: int
    """The new-token slots first .. end - 1 of the request's batch index attend over this span."""
    slots: int
    """Number of cache slots up to and including that of the range's last token."""


@dataclass(frozen=True)
class AttentionSpans:
    """Holds the attention calls of one pass: for each batch index a tuple of `SlotSpan`s, one call each. The tuple is
    empty for a batch index whose result is never read."""

    pieces: tuple[tuple[SlotSpan, ...], ...]
    is_without_pads: bool = False
    """Whether the calls of a batch index cover its own tokens alone, so that it has the bits of a pass by itself. If
    False, they cover pads too: a request then has the same bits whether its other tokens are pads or not."""
    _masks: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)
    _tables: dict[tuple[int, ...], NDArray[np.int64]] = field(default_factory=dict, repr=False)

    @property
    def span(self) -> int:
        """Number of cache slots of the longest attention call."""
        return max((piece.span for row in self.pieces for piece in row), default=0)

    def own_table(self, row: int) -> NDArray[np.int64]:
        """Returns the table of `request_table` for a pass of one batch index by itself, relative to its own keys and
        values."""
        last = self.pieces[row][-1]
        return np.array([[0, 0, 0, last.slots, last.slots - last.end]], np.int64)

    def mask(self, mask: Tensor, row: int, count: int, repeats: int, span: int) -> Tensor:
        """Returns the additive mask [1, 1 or g, r * count, span] of an attention call for the first `count` tokens of a
        batch index, cut from a mask [b, 1 or h, t, s]. r = h / g query heads share a key head."""
        if mask.shape[1] > 1:  # some heads have masks of their own, which differ between layers
            return mask[row : row + 1, :, :count, :span].reshape(1, -1, repeats * count, span)
        key = id(mask), row, span
        if key not in self._masks:
            self._masks[key] = mask, mask[row : row + 1, :, :count, :span].repeat(1, 1, repeats, 1)
        return self._masks[key][1]

    def request_table(self, cached: KeysAndValues) -> NDArray[np.int64]:
        """Returns the int64 table [n, 5] that `decode_attention` takes as `places` (columns: see there), with one line
        for each batch index that has an attention call (`SlotSpan`).

        Layers whose keys and values have equal strides share one table. Each layer must hold all sequences in one
        allocation and in the same order, as a KVCache does.
        """
        rows = [row for row, pieces in enumerate(self.pieces) if pieces]
        first = cached(rows[0], 1)
        key = (*first[0].stride(), *first[1].stride())
        if key not in self._tables:
            table = np.empty((len(rows), 5), np.int64)
            for line, row in zip(table, rows, strict=True):
                keys, values = cached(row, 1)
                last = self.pieces[row][-1]
                to_own = _elements(first[0], keys), _elements(first[1], values)
                line[:] = row, *to_own, last.slots, last.slots - last.end
            self._tables[key] = table
        return self._tables[key]


def spans_of_positions(start: int, count: int, capacity: int) -> tuple[SlotSpan, ...]:
    """Returns a tuple of `SlotSpan`s (attention calls) for `count` new tokens from position `start` on: each token
    attends over the span of its own position.

    So a position attends over the same span at every index of a window.
    """
    pieces, first = [], 0
    while first < count:
        span = -(-(start + first + 1) // SPAN_STEP) * SPAN_STEP
        end = min(count, span - start)
        pieces.append(SlotSpan(min(span, capacity), first, end, start + end))
        first = end
    return tuple(pieces)


def spans_of_pass(start: int, count: int, capacity: int) -> tuple[SlotSpan, ...]:
    """Returns a tuple of one `SlotSpan` (attention call) for all `count` new tokens from position `start` on. For
    passes whose start depends only on the request, such as a prompt's chunks."""
    return (SlotSpan(min(-(-(start + count) // SPAN_STEP) * SPAN_STEP, capacity), 0, count, start + count),)


def spans_of(phase: str, width: int) -> Callable[[int, int, int], tuple[SlotSpan, ...]]:
    """Returns the function that gives the attention calls of a request in a pass of `width` tokens: `spans_of_pass` for
    a prompt's chunks that are longer than a step of spans, else `spans_of_positions`."""
    return spans_of_pass if phase == "prefill" and width > SPAN_STEP else spans_of_positions


def attend_by_request(
    q: Tensor,
    cached: KeysAndValues,
    mask: Tensor,
    spans: AttentionSpans,
    scale: float | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Returns attention outputs [b, t, h * d] of queries [b, h, t, d]. Each request is computed by itself (in its own
    torch calls or in compiled loops), so that its bits do not depend on the batch. mask: [b, 1 or h, t, s], additive.

    cached: gives a request's keys and values.  spans: the calls. Query heads that share a key head are folded into the
    rows of one call. A batch index without a call gives zeros. sinks: [h], as in `attend_together`.
    Twin: ops.references.cached_attention, close: sums are ordered otherwise.
    """
    is_plain = softcap is None and sinks is None
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    if sinks is None and serves(q) and (rows := [row for row, pieces in enumerate(spans.pieces) if pieces]):
        keys, values = cached(rows[0], 1)
        out = decode_attention(q, keys, values, mask, spans.request_table(cached), factor, softcap)
        return out.transpose(1, 2).flatten(2)
    batch, heads, width, _ = q.shape
    attend = scaled_dot_product_attention if is_plain else partial(_attend_by_scores, softcap=softcap, sinks=sinks)
    outputs = []
    with _Threads(q.device) as threads:
        for row, pieces in enumerate(spans.pieces):
            count = pieces[-1].end if pieces and spans.is_without_pads else width
            own, of_row = q[row : row + 1, :, :count], partial(cached, row)
            if not pieces:
                out = q.new_zeros(1, heads, width, of_row(1)[1].shape[3])
            elif sinks is None and count < width and serves(own):
                own_mask = mask[row : row + 1, :, :count]
                out = decode_attention(own, *of_row(1), own_mask, spans.own_table(row), factor, softcap)
            else:
                of_span = partial(spans.mask, mask, row, count, heads // of_row(1)[0].shape[1])
                out = _attend_alone(own, of_row, of_span, pieces, partial(attend, scale=scale), threads)
            outputs.append(out if count == width else pad(out, (0, 0, 0, width - count)))
        return torch.cat(outputs).transpose(1, 2).reshape(batch, width, -1)


def _attend_alone(
    q: Tensor,
    cached: Callable[[int], tuple[Tensor, Tensor]],
    mask: Callable[[int], Tensor],
    pieces: Sequence[SlotSpan],
    attend: Callable[..., Tensor],
    threads: "_Threads",
) -> Tensor:
    """Returns attention outputs [1, h, t, dv] of one request's queries [1, h, t, d], from one call for each piece.

    cached, mask: functions of a span, which give the keys and values, and the mask [1, 1 or g, r * t, span].
    """
    _, heads, width, depth = q.shape
    threads.take(q.numel() * pieces[0].span)
    groups = cached(1)[0].shape[1]
    folded = (1, groups, heads // groups, width)
    own = _aligned(q.reshape(1, groups, -1, depth))
    parts = []
    for piece in pieces:
        threads.take(q.numel() * piece.span)
        parts.append(attend(own, *cached(piece.span), attn_mask=mask(piece.span)).view(*folded, -1))
    if len(parts) > 1:
        cut = [part[:, :, :, piece.first : piece.end] for part, piece in zip(parts, pieces, strict=True)]
        cut.append(parts[-1][:, :, :, pieces[-1].end :])  # pads, whose outputs are not read
        parts = [torch.cat(cut, 3)]
    return parts[0].view(1, heads, width, -1)


def attend_together(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scale: float | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Returns attention outputs [b, t, h * d] of queries [b, h, t, d], in one call for the whole batch. The bits of a
    request may depend on the batch.

    keys, values: [b, g, s, d].  sinks: [h], a score of each head that takes weight and adds no value.
    """
    batch, heads, width, _ = q.shape
    repeats = heads // keys.shape[1]
    is_grouped = False
    if softcap is not None or sinks is not None:
        keys, values = (tensor.repeat_interleave(repeats, 1) for tensor in (keys, values))
        out = _attend_by_scores(q, keys, values, attn_mask=mask, scale=scale, softcap=softcap, sinks=sinks)
        return out.transpose(1, 2).reshape(batch, width, -1)
    if repeats > 1 and width == 1:  # all queries that share a key head in one product: five times faster
        q = q.reshape(batch, heads // repeats, repeats, -1)
        mask = mask if mask.shape[1] == 1 else mask.reshape(batch, heads // repeats, repeats, -1)
    elif repeats > 1:
        is_grouped = q.device.type == "cpu"
        if not is_grouped:  # CUDA's fused kernels take no mask together with grouped heads
            keys, values = (tensor.repeat_interleave(repeats, 1) for tensor in (keys, values))
    out = scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale, enable_gqa=is_grouped)
    return out.reshape(batch, heads, width, -1).transpose(1, 2).reshape(batch, width, -1)


def _attend_by_scores(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    attn_mask: Tensor,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Returns attention outputs [b, g, r * t, d] of queries of r = h / g heads for each key head."""
    return _weights(q, keys, attn_mask, scale, softcap, sinks) @ values


def attention_pattern(
    q: Tensor,
    cached: KeysAndValues,
    mask: Tensor,
    spans: AttentionSpans | None,
    scale: float | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Returns the weights [b, h, t, s] with which queries [b, h, t, d] attend to the cache slots, 0 beyond a token's
    span. Each token is computed by itself, so that its bits depend on no other. Arguments: as in `attend_by_request`;
    spans: None for all slots of the mask.

    Twin: transformers' eager attention, close(1e-5) in float32.
    """
    batch, heads, width, _ = q.shape
    whole = (SlotSpan(mask.shape[-1], 0, width, 0),)
    pattern = q.new_zeros(batch, heads, width, mask.shape[-1])
    for row, pieces in enumerate([whole] * batch if spans is None else spans.pieces):
        for piece in pieces:
            keys = cached(row, piece.span)[0]
            keys = keys.repeat_interleave(heads // keys.shape[1], 1)
            for t in range(piece.first, min(piece.end, width)):
                own_mask = mask[row : row + 1, :, t : t + 1, : piece.span]
                own = _weights(q[row : row + 1, :, t : t + 1].clone(), keys, own_mask, scale, softcap, sinks)
                pattern[row, :, t, : piece.span] = own[0, :, 0]
    return pattern


def _weights(
    q: Tensor, keys: Tensor, mask: Tensor, scale: float | None, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Returns attention weights [b, g, r * t, s]. Scores are limited to +-softcap, and the softmax includes one more
    score for each head: sinks [h]. Source: Gemma 2 (arXiv 2408.00118); gpt-oss (arXiv 2508.10925)."""
    scores = (q @ keys.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    scores = scores + mask
    if sinks is not None:
        groups, rows = scores.shape[1:3]
        repeats = len(sinks) // groups
        added = sinks.to(scores.dtype).view(1, groups, repeats, 1).expand(len(scores), -1, -1, rows // repeats)
        scores = torch.cat((scores, added.reshape(len(scores), groups, rows, 1)), -1)
    return scores.softmax(-1, dtype=torch.float32).to(q.dtype)[..., : keys.shape[2]]


def _aligned(part: Tensor) -> Tensor:
    return part if part.data_ptr() % _ALIGNMENT == 0 else part.clone(memory_format=torch.contiguous_format)


def _elements(first: Tensor, other: Tensor) -> int:
    """Returns the number of elements between the starts of two slices of one tensor."""
    return (other.data_ptr() - first.data_ptr()) // first.element_size()


class _Threads:
    """Sets torch's number of threads for attention calls on a CPU, and restores it at the end of the `with`."""

    def __init__(self, device: torch.device) -> None:
        self._is_cpu = device.type == "cpu"

    def __enter__(self) -> "_Threads":
        if self._is_cpu:
            _thread_count.acquire()
        self._all = self._now = torch.get_num_threads()
        return self

    def take(self, work: int) -> None:
        """Sets torch's number of threads for an attention call with `work` multiplications on a CPU."""
        wanted = 1 if self._is_cpu and work <= _ONE_THREAD_WORK else self._all
        if wanted != self._now:
            torch.set_num_threads(wanted)
            self._now = wanted

    def __exit__(self, *exc: object) -> None:
        if self._now != self._all:
            torch.set_num_threads(self._all)
        if self._is_cpu:
            _thread_count.release()
