"""Offers our KVCache to plain transformers models, some of which also ask the cache for a length."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from transformers.cache_utils import Cache

from cacheprobe.core.live import LiveConfig
from cacheprobe.kvcache.cache import KVCache
from cacheprobe.kvcache.recurrent import memory_of
from cacheprobe.models.hf.cache import KVCacheLayer, PlainInputs
from cacheprobe.models.hf.masks import attention_masks
from cacheprobe.models.plain.recurrence import RecurrentPlaces


class PlainCacheLayer(KVCacheLayer):
    """Presents one layer of a KVCache as a cache layer of transformers that has a length."""

    def __init__(self, cache: KVCache, layer: int, length: int) -> None:
        super().__init__(cache, layer)
        self._length = length

    def get_seq_length(self) -> int:
        """Returns the position at which the first batch index starts. A family that takes positions from here would be
        wrong for the other batch indices; `check_plain` compares such a batch at load."""
        return self._length


class PlainCacheAdapter(Cache):
    """Presents a KVCache as transformers' Cache, for models that ask for its length."""

    def __init__(self, cache: KVCache, cache_rows: Sequence[int], starts: Sequence[int]) -> None:
        length = int(starts[0])
        super().__init__(layers=[PlainCacheLayer(cache, layer, length) for layer in range(len(cache.keys))])
        memory = memory_of(cache)
        self.places = None if memory is None else RecurrentPlaces(memory, cache_rows, starts)
        """Where recurrent layers find their states; None for a model without any."""


@contextmanager
def staged_plain(
    cache: KVCache, cache_rows: Sequence[int], starts: Sequence[int], width: int, config: LiveConfig, n_ctx: int
) -> Iterator[PlainInputs]:
    """Sets the positions of one forward on `cache`, as `hf.cache.staged` does, and yields the keyword arguments for a
    plain model."""
    positions = cache.stage(cache_rows, starts, width)
    dtype, device = cache.keys[0].dtype, cache.keys[0].device
    try:
        yield {
            "past_key_values": PlainCacheAdapter(cache, cache_rows, starts),
            "attention_mask": attention_masks(config, cache, positions, dtype, device),
            "position_ids": positions.clamp(max=n_ctx - 1).to(device),
        }
    finally:
        cache.unstage()
