"""Defines ThinkingCache, a KVCache that also stores, by position, the layer outputs H and the chunk states of a
Thinking States model, and new thoughts; and ChunkStates, which computes the state of each distinct thought once.

Every tensor is indexed by position, like keys and values. A rollback only shortens the sequence; values beyond its
length are stale until computed again. Half-filled chunks need no further record.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cacheprobe.kvcache.cache import KVCache, zeros
from cacheprobe.kvcache.cache import RowThought as RowThought
from cacheprobe.kvcache.staged import StagedCache
from cacheprobe.models.thinking.blocks import Memory, Remembered, attention_bias
from cacheprobe.models.thinking.config import ThinkingConfig
from cacheprobe.models.thinking.model import ThinkingModel


class ThinkingCache(KVCache):
    """Stores keys, values, layer outputs H (of layer l_out - 1) and chunk states for several sequences, one in each
    cache row."""

    can_compute_twice = False

    def __init__(
        self,
        rows: int,
        capacity: int,
        layer_shapes: Sequence[tuple[int, int, int]],
        dtype: torch.dtype,
        device: torch.device | str,
        d_model: int,
        chunk: int,
    ) -> None:
        super().__init__(rows, capacity, layer_shapes, dtype, device)
        self.layer_outputs = zeros((rows, capacity, d_model), dtype, device)
        self.chunk_states = zeros((rows, capacity + chunk, d_model), dtype, device)
        """Chunk state to add at each position. A state belongs to the chunk after its thought, which may lie beyond the
        capacity, so there are `chunk` more positions."""
        self._thoughts: list[RowThought] = []

    @property
    def cache_bytes(self) -> int:
        """Size in bytes of all cached tensors: keys, values, layer outputs H and chunk states."""
        return super().cache_bytes + sum(t.numel() * t.element_size() for t in (self.layer_outputs, self.chunk_states))

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` slots of keys and values, and all layer outputs H and chunk states, from cache row
        `source` to cache row `target`."""
        super().copy_row(source, target, length)
        self.layer_outputs[target] = self.layer_outputs[source]
        self.chunk_states[target] = self.chunk_states[source]

    def scrub(self, row: int, start: int) -> None:
        """Zeroes keys, values, layer outputs H and chunk states of a cache row, from slot `start` on."""
        super().scrub(row, start)
        self.layer_outputs[row, start:] = 0
        self.chunk_states[row, start:] = 0

    def note(self, thought: RowThought) -> None:
        """Stores a new thought, which the next `take_thoughts` returns."""
        self._thoughts.append(thought)

    def take_thoughts(self) -> list[RowThought]:
        """Returns the list of thoughts noted since the last call, and forgets these thoughts."""
        taken, self._thoughts = self._thoughts, []
        return taken


def cache_memory(config: ThinkingConfig, cache: StagedCache) -> Memory:
    """Returns the Memory of one forward over a StagedCache: a function by which each layer writes its new keys and
    values, and gets all cached keys and values, the mask, and `cache.spans` (the slots to attend to, None: all)."""
    dtype, device = cache.keys[0].dtype, cache.keys[0].device
    slots = torch.arange(cache.span)[None]
    bias = attention_bias(config, cache.positions, slots, config.attention_window)
    if not config.thinks:  # cache surgery may hide slots only in cache rows that hold nothing but keys and values
        bias = bias + cache.mask(bias.dtype, "cpu")
    lowest = max(torch.finfo(kind).min for kind in (bias.dtype, dtype))
    bias = bias.clamp_(min=lowest).to(device, dtype)  # finite in 16 bits too
    bias = cache.mask_by_layer(bias, config.n_heads)

    def memory(layer: int, keys: Tensor, values: Tensor) -> Remembered:
        """Writes a layer's new keys and values. Returns all cached keys and values, the mask, and for each request the
        slots that it attends to (None for all)."""
        return *cache.write(layer, keys, values), bias, cache.spans

    return memory


class ChunkStates:
    """Computes the chunk state of each distinct thought alone, so that its bits depend on the thought only, and keeps
    the state until `forget_old` or `forget_other_weights` clears it."""

    def __init__(self, model: ThinkingModel) -> None:
        self.model = model
        self._kept: dict[tuple[int, ...], Tensor] = {}
        self._valid_for: object = None
        self._weights_sha256 = ""
        self._points = [point for name, point in model.hook_dict.items() if name.startswith("compression")]

    def of(self, thought_ids: tuple[int, ...]) -> Tensor:
        """Returns the chunk state [c, m] of one thought, given by its token ids; computed only if not kept yet."""
        if thought_ids not in self._kept:
            config = self.model.config
            width = max(len(thought_ids), config.max_thought)
            ids = torch.tensor([[*thought_ids, *[config.pad_id] * (width - len(thought_ids))]])
            with torch.inference_mode():
                self._kept[thought_ids] = self.model.compress(ids.to(self.model.embed.weight.device))[0]
        return self._kept[thought_ids]

    def forget_old(self) -> None:
        """Clears the kept chunk states if the address or version counter of a weight changed since the last call, or if
        the compression block has or had hooks. Call `forget_old` before each forward."""
        versions = tuple((w.data_ptr(), 0 if w.is_inference() else w._version) for w in self.model.parameters())
        is_hooked = any(point.fwd_hooks for point in self._points)
        if is_hooked or self._valid_for != (versions, is_hooked):
            self._kept.clear()
        self._valid_for = (versions, is_hooked)

    def forget_other_weights(self, weights_sha256: str) -> None:
        """Clears the kept chunk states if `weights_sha256` differs from the last call's: an edit through `weight.data`
        changes no version counter, so `forget_old` misses it."""
        if weights_sha256 != self._weights_sha256:
            self._kept.clear()
        self._weights_sha256 = weights_sha256
