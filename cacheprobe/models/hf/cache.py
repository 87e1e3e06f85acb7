"""Our KV cache behind Hugging Face's cache interface, so that stock attention reads and writes it.

Positions are staged on the KVCache before each forward. The two methods from which transformers would guess a
position or build a mask raise: a forgotten mask or position is then an error and never a silent mistake.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import Tensor, device
from transformers.cache_utils import Cache, CacheLayerMixin

from cacheprobe.kvcache.cache import KVCache
from cacheprobe.models.hf.masks import attention_masks


class RowsLayer(CacheLayerMixin):
    """One layer's view of a KVCache."""

    is_compileable = True
    is_croppable = False
    is_sliding = False
    supports_early_init = True

    def __init__(self, cache: KVCache, layer: int) -> None:
        super().__init__()
        self._cache, self._layer = cache, layer
        # after super().__init__(), which sets them to None
        self.keys, self.values = cache.keys[layer], cache.values[layer]
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: rows are preallocated."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write [b, h, t, d] at the staged positions; returns the whole span [b, h, s, d]."""
        return self._cache.write(self._layer, key_states, value_states)

    def get_seq_length(self) -> NoReturn:
        raise RuntimeError("position_ids must be passed with a RowsCache: rows have lengths of their own")

    def get_mask_sizes(self, query_length: int) -> NoReturn:
        raise RuntimeError("a 4-D attention mask must be passed with a RowsCache")

    def get_max_length(self) -> int:
        return self._cache.capacity


class RowsCache(Cache):
    """A KVCache as transformers' models expect it."""

    def __init__(self, cache: KVCache) -> None:
        super().__init__(layers=[RowsLayer(cache, layer) for layer in range(len(cache.keys))])
        self.rows = cache


@contextmanager
def staged(
    cache: KVCache, rows: Sequence[int], starts: Sequence[int], width: int, config: Any, n_ctx: int
) -> Iterator[dict[str, Any]]:
    """What one forward of `width` slots a row must be given to run over our cache; nothing is staged after it."""
    positions = cache.stage(rows, starts, width)
    dtype, device = cache.keys[0].dtype, cache.keys[0].device
    try:
        yield {
            "past_key_values": RowsCache(cache),
            "attention_mask": attention_masks(config, cache, positions, dtype, device),
            # pads may lie beyond the context; learned position tables have no row there
            "position_ids": positions.clamp(max=n_ctx - 1).to(device),
        }
    finally:
        cache.unstage()


class ShapeProbe(Cache):
    """Notes each layer's (heads, key width, value width) and device in one short forward, and caches nothing."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.layer_shapes: dict[int, tuple[int, int, int]] = {}
        self.devices: dict[int, device] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.layer_shapes[layer_idx] = (key_states.shape[1], key_states.shape[-1], value_states.shape[-1])
        self.devices[layer_idx] = key_states.device
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0
