"""Shows a KVCache to one forward: where the forward writes, over which slots it attends, and its masks.

A model makes a StagedCache at the start of a forward and drops it at the end, so the cache keeps nothing of a pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cacheprobe.core.devices import upload
from cacheprobe.kvcache.cache import KVCache, StoreSlots
from cacheprobe.kvcache.ledger import CacheIntegrityError
from cacheprobe.kvcache.recurrent import memory_of
from cacheprobe.ops.attention import AttentionSpans
from cacheprobe.ops.equality import bitwise

_SPAN_STEP = 32
"""Step in slots by which attention's span grows: fewer spans mean fewer tensor shapes."""

_FEW_ROWS = 4
"""Up to this many batch indices are written slice by slice, which is faster than indexing every slot."""


@dataclass(frozen=True)
class DuplicateEntry:
    """Names a batch index (`copy`) that computes the tokens of another one (`original`) a second time in the same pass,
    and which tokens to compare."""

    original: int
    copy: int
    shift: int
    """Number of slots by which the copy's tokens stand later in the window than the original's."""
    num_tokens: int
    """Number of tokens of this pass to compare."""
    num_again: int = 0
    """Number of earlier tokens to compare with the cache's contents, which an earlier pass computed."""
    differs_at: list[tuple[int, str]] = field(default_factory=list)
    """(layer, site) wherever the copy has other bits than the original; "keys" and "values" are sites, too."""

    def pair(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (original, copy): the compared tokens of a tensor [b, t, ...], each [num_tokens, ...]."""
        return value[self.original, : self.num_tokens], value[self.copy, self.shift : self.shift + self.num_tokens]


class PassAttention(NamedTuple):
    """Holds over which cache slots the attention of a pass runs, and which of its tokens are computed twice."""

    num_slots: int | None = None
    """Number of slots in use, if attention need not run over more; sums may then have other bits than over all. None
    for those of `spans`, or without it for the whole capacity."""
    spans: AttentionSpans | None = None
    """The slots of each request, if attention runs request by request."""
    duplicate: DuplicateEntry | None = None
    """The last batch index of the pass, if it computes the tokens of another one again."""


class Placed(NamedTuple):
    """Holds what a forward feeds, and where it writes and attends, as tensors on the device that computes a layer."""

    token_ids: Tensor
    """[b, t]; empty if the StagedCache was given none."""

    rows: Tensor
    """[b]: the cache row of each batch index."""
    written_rows: Tensor
    """[b]: as `rows`, but -1 for a batch index whose keys and values are compared instead of stored."""
    starts: Tensor
    """[b]: position of the first token."""
    positions: Tensor
    """[b, t]"""


class SharedPrefix(KVCache):
    """Shares the first positions of one cache row with forwards that continue them in a batch of any size.

    A forward is staged for one cache row and may hold more batch indices: models broadcast masks and positions over the
    batch. Each batch index attends to the shared positions and to its own tokens. The cache is not written, so its
    positions can be shared again.
    Twin: tests.twins.patching_slowly: the whole text without a cache, one run for each batch index.
    """

    def __init__(self, cache: KVCache, length: int) -> None:
        """Shares the first `length` positions of row 0 of `cache`. The tensors are the cache's own, not copies. Raises:
        ValueError if the row has fewer positions in use."""
        if not 0 <= length <= int(cache.lengths[0]):
            raise ValueError(f"cache row 0 holds {int(cache.lengths[0])} positions, not {length}")
        vars(self).update(vars(cache))
        if (memory := memory_of(cache)) is not None:
            vars(self)["recurrent"] = memory.unwritten()
        self.length = length


class StagedCache:
    """Shows a KVCache to one forward: token slot t of batch index b is at position starts[b] + t of cache row rows[b].

    Pads count too, so start + width must fit the capacity. A free row may occur several times: dummies use it, and the
    keys and values of dummies are never read.
    """

    def __init__(
        self,
        cache: KVCache,
        rows: Sequence[int],
        starts: Sequence[int],
        width: int,
        attention: PassAttention | None = None,
        token_ids: Tensor | None = None,
    ) -> None:
        """Checks the places. token_ids: [b, t], if `placed` is to give them.

        Raises: ValueError if a taken row occurs twice (except for the pass's duplicate), if there are more or fewer
        starts than rows, or if positions leave the capacity."""
        self.cache, self.keys, self.values = cache, cache.keys, cache.values
        num_slots, self.spans, self.duplicate = attention or PassAttention()
        if self.spans is not None and num_slots is None:
            num_slots = self.spans.span
        self.span = cache.capacity
        """Number of slots that attention runs over."""
        if num_slots is not None:
            self.span = min(-(-num_slots // _SPAN_STEP) * _SPAN_STEP, cache.capacity)
        start, copy = torch.tensor(starts, dtype=torch.long), -1 if self.duplicate is None else self.duplicate.copy
        written = [row for b, row in enumerate(rows) if b != copy and not cache.is_free(row)]
        if len(rows) != len(start) or len(set(written)) != len(written):
            raise ValueError(f"a forward needs one start for each of its rows, each row once; got {rows} and {starts}")
        if int(start.max()) + width > cache.capacity or int(start.min()) < 0:
            raise ValueError(
                f"cache rows {list(rows)} at positions {list(starts)} + {width} slots leave the capacity of "
                f"{cache.capacity}; set capacity={int(start.max()) + width} or more"
            )
        self.rows, self.starts = list(map(int, rows)), list(map(int, starts))
        self.positions = start[:, None] + torch.arange(width)
        """[b, t]: absolute position of each token."""
        self._token_ids = torch.empty(0, dtype=torch.long) if token_ids is None else token_ids
        self._row_index = torch.tensor(self.rows, dtype=torch.long)[:, None]
        run = range(self.rows[0], self.rows[0] + len(self.rows))
        self._run = slice(run.start, run.stop) if self.rows == [*run] else None
        """The rows, if their numbers follow each other."""
        self.is_read_in_place = False
        """Whether a kernel attends over the cache itself, and nothing else reads masks or what `write` returns."""
        self._placed: dict[torch.device, Placed] = {}
        self._masks: list[tuple[Tensor, Tensor]] = []  # (mask that the model uses, mask without hidden heads)

    @property
    def is_written(self) -> bool:
        """False for a SharedPrefix, to whose slots `write` joins the new keys and values without storing them."""
        return not isinstance(self.cache, SharedPrefix)

    def placed(self, device: torch.device) -> Placed:
        """Returns tokens, rows and positions as a Placed on `device`, in one copy for each forward."""
        if device not in self._placed:
            rows, starts = self._row_index[:, 0], torch.tensor(self.starts)
            written = rows.clone()
            if self.duplicate is not None:
                written[self.duplicate.copy] = -1
            self._placed[device] = Placed(*upload(device, (self._token_ids, rows, written, starts, self.positions)))
        return self._placed[device]

    # -- keys and values

    def write(self, layer: int, k: Float[Tensor, "b h t dk"], v: Float[Tensor, "b h t dv"]) -> tuple[Tensor, Tensor]:
        """Stores new keys and values. Returns all keys and values of the cache rows up to slot `self.span`, [b, h, s,
        d] each; just the new ones if `is_read_in_place`. For a SharedPrefix stores nothing: returns the shared ones
        followed by the new ones."""
        held = self.keys[layer], self.values[layer]
        if isinstance(self.cache, SharedPrefix):
            shared = (tensor[:1, :, : self.cache.length].expand(len(k), -1, -1, -1) for tensor in held)
            keys, values = (torch.cat(pair, dim=2) for pair in zip(shared, (k, v), strict=True))
            return keys, values
        self.store(layer, k, v)
        if self.is_read_in_place:
            return k, v
        index = self._run or self.placed(held[0].device).rows
        keys, values = (tensor[:, :, : self.span][index] for tensor in held)
        return keys, values

    def store(
        self,
        layer: int,
        k: Float[Tensor, "b h t dk"],
        v: Float[Tensor, "b h t dv"],
        writer: StoreSlots | None = None,
        compare_later: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        """Stores new keys and values. Those of the pass's duplicate, if it has one, are compared instead of stored.

        writer: writes instead of `cache.writer`.  compare_later: takes the function that compares, to call it when `k`
        and `v` are computed; by default they are.
        Raises: CacheIntegrityError for another number of batch indices or tokens than was staged.
        """
        self._hide_in_heads(layer)
        keys, values, duplicate = self.keys[layer], self.values[layer], self.duplicate
        batch, width = self.positions.shape
        if (k.shape[0], k.shape[2]) != (batch, width):
            raise CacheIntegrityError(f"layer {layer} wrote {tuple(k.shape)} for staged {(batch, width)}")
        if duplicate is not None:
            compare = partial(self._compare, layer, duplicate, k, v)
            compare() if compare_later is None else compare_later(compare)
        if (writer := writer or self.cache.writer) is not None:
            placed = self.placed(keys.device)
            writer(k, v, keys, values, placed.written_rows, placed.starts)
            return
        count = batch if duplicate is None else batch - 1  # the copy is the last batch index of its pass
        if batch <= _FEW_ROWS:
            for b, (row, start) in enumerate(zip(self.rows[:count], self.starts[:count], strict=True)):
                keys[row, :, start : start + width] = k[b]
                values[row, :, start : start + width] = v[b]
        else:
            placed = self.placed(keys.device)
            places = placed.rows[:count, None], slice(None), placed.positions[:count]
            keys[places] = k[:count].transpose(1, 2)
            values[places] = v[:count].transpose(1, 2)

    def _compare(self, layer: int, duplicate: DuplicateEntry, k: Tensor, v: Tensor) -> None:
        """Adds (layer, "keys" or "values") to the duplicate's differences if the recomputed ones have other bits."""
        row, start = self.rows[duplicate.original], self.starts[duplicate.original]
        for name, new, cached in (("keys", k, self.keys[layer]), ("values", v, self.values[layer])):
            pair = duplicate.pair(new.transpose(1, 2))
            earlier = cached[row, :, start - duplicate.num_again : start]
            recomputed = new[duplicate.copy, :, duplicate.shift - duplicate.num_again : duplicate.shift]
            if not (bitwise(*pair) and bitwise(earlier, recomputed)):
                duplicate.differs_at.append((layer, name))

    def row_view(self, layer: int, batch_index: int, span: int) -> tuple[Tensor, Tensor]:
        """Returns the keys and values in the first `span` slots of the cache row of a batch index, [1, h, span, d]
        each: views that are built once for a cache."""
        row = self.rows[batch_index]
        key = layer, row, span
        views = self.cache.views
        if key not in views:
            views[key] = self.keys[layer][row : row + 1, :, :span], self.values[layer][row : row + 1, :, :span]
        return views[key]

    # -- masks

    def mask(self, dtype: torch.dtype, device: torch.device | str, window: int | None = None) -> Tensor:
        """Returns the additive causal mask [b, 1, t, s] over the first `self.span` slots: 0 for a slot to attend to,
        the dtype's minimum for every other slot; a mask of one slot if `is_read_in_place`.

        window: how many positions a token sees, including its own; None for all up to its own.
        Slots that cache surgery hides are masked for all later tokens. The mask is additive, never boolean: Hugging
        Face's eager attention would add a boolean mask to the scores, without an error.
        """
        device = torch.device(device)
        if self.is_read_in_place:
            return torch.zeros(1, 1, 1, 1, dtype=dtype, device=device).expand(
                len(self.rows), 1, *self.positions.shape[1:], 1
            )
        positions = self.positions if device.type == "cpu" else self.placed(device).positions
        slots, positions = torch.arange(self.span, device=device), positions[..., None]
        hidden = slots > positions
        if window is not None:
            hidden |= slots <= positions - window
        if bool((edited_out := self.cache.hidden[self._row_index[:, 0], : self.span]).any()):
            hidden |= edited_out.to(device)[:, None] & (slots != positions)
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
        return mask.masked_fill_(hidden, torch.finfo(dtype).min)[:, None]

    def mask_by_layer(self, mask: Tensor, num_heads: int) -> Tensor:
        """Returns the mask [b, 1, t, s] unchanged; or, if slots of the rows are hidden in single layers or heads, a
        mask [b, num_heads, t, s] that is updated in place when a layer writes to the cache.

        A model takes one mask for all its layers, and each layer writes to the cache before it attends.
        Raises: ValueError if slots are hidden in single layers or heads and the layers are on several devices.
        """
        if not self.cache.head_masks.concern(self.rows):
            return mask
        if len({tensor.device for tensor in self.keys}) > 1:
            raise ValueError("rows masked in some layers or heads need a model on one device; hide them in all layers")
        own = mask.expand(-1, num_heads, -1, -1).clone()
        self._masks.append((own, mask))
        return own

    def _hide_in_heads(self, layer: int) -> None:
        """Updates the masks of `mask_by_layer`, in place, for the layer that attends next."""
        for own, plain in self._masks:
            own.copy_(plain.expand_as(own))
            self.cache.head_masks.hide(own, self.rows, layer)

    def hidden_slots(self, layer: int) -> Bool[Tensor, "r h s"] | None:
        """Returns which slots are hidden from later tokens by the key heads of a layer, on the layer's device; None if
        none of the rows has such a slot."""
        if not self.cache.hides_slots(self.rows):
            return None
        by_head = self.cache.hidden[:, None].expand(-1, self.keys[layer].shape[1], -1)
        return self.cache.head_masks.added_to(by_head, layer).to(self.keys[layer].device)
