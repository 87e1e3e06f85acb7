"""Offers our KVCache to plain transformers models, some of which also ask the cache for a length."""

from transformers.cache_utils import Cache

from cacheprobe.core.live import LiveConfig
from cacheprobe.kvcache.recurrent import memory_of
from cacheprobe.kvcache.staged import StagedCache
from cacheprobe.models.hf.cache import KVCacheLayer, PlainInputs, forward_inputs
from cacheprobe.models.plain.recurrence import RecurrentPlaces


class PlainCacheLayer(KVCacheLayer):
    """Presents one layer of a StagedCache as a cache layer of transformers that has a length."""

    def __init__(self, cache: StagedCache, layer: int, length: int) -> None:
        super().__init__(cache, layer)
        self._length = length

    def get_seq_length(self) -> int:
        """Returns the position at which the first batch index starts. A family that takes positions from here would be
        wrong for the other batch indices; `check_plain` compares such a batch at load."""
        return self._length


class PlainCacheAdapter(Cache):
    """Presents a StagedCache as transformers' Cache, for models that ask for its length."""

    def __init__(self, cache: StagedCache) -> None:
        length = cache.starts[0]
        super().__init__(layers=[PlainCacheLayer(cache, layer, length) for layer in range(len(cache.keys))])
        memory = memory_of(cache.cache)
        self.places = None if memory is None else RecurrentPlaces(memory, cache.rows, cache.starts)
        """Where recurrent layers find their states; None for a model without any."""


def plain_inputs(cache: StagedCache, config: LiveConfig, n_ctx: int) -> PlainInputs:
    """Returns the keyword arguments of one forward for a plain model, as `hf.cache.forward_inputs` does."""
    inputs = forward_inputs(cache, config, n_ctx)
    return {**inputs, "past_key_values": PlainCacheAdapter(cache)}
