"""Shares the first positions of one cache row with a whole batch: every sequence attends to them, and no sequence
changes them."""

import torch
from torch import Tensor

from cacheprobe.kvcache.cache import KVCache
from cacheprobe.kvcache.recurrent import memory_of


class SharedPrefix(KVCache):
    """Shares the first positions of one cache row with forwards that continue them in a batch of any size.

    A forward is staged for one cache row and may hold more batch indices: models broadcast masks and positions over the
    batch. Each batch index attends to the shared positions and to its own tokens. The cache is not written, so its
    positions can be shared again.
    Twin: tests.twins.patching_slowly: the whole text without a cache, one run for each batch index.
    """

    is_written = False

    def __init__(self, cache: KVCache, length: int) -> None:
        """Shares the first `length` positions of row 0 of `cache`. The tensors are the cache's own, not copies. Raises:
        ValueError if the row has fewer positions in use."""
        if not 0 <= length <= int(cache.lengths[0]):
            raise ValueError(f"cache row 0 holds {int(cache.lengths[0])} positions, not {length}")
        vars(self).update(vars(cache))
        if (memory := memory_of(cache)) is not None:
            vars(self)["recurrent"] = memory.unwritten()
        self.length = length
        self._staged = None

    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the shared keys and values followed by the new k and v, [b, h, s, d] each, for each batch index of k
        and v. Nothing is stored."""
        return self._joined(self.keys[layer], k), self._joined(self.values[layer], v)

    def _joined(self, cached: Tensor, new: Tensor) -> Tensor:
        return torch.cat([cached[:1, :, : self.length].expand(len(new), -1, -1, -1), new], dim=2)
