"""Shares the first positions of one cache row with a whole batch: each sequence attends to them, none writes them."""

import torch
from torch import Tensor

from cacheprobe.kvcache.cache import KVCache


class SharedPrefix(KVCache):
    """The first positions of one cache row, for forwards that continue it with a batch of any size.

    A forward is staged for one row and may hold more batch indices: models broadcast masks and positions over the
    batch. Each batch index attends to the shared positions and to its own tokens. The cache is not written, so it can
    be shared again.
    Twin: tests.twins.patching_slowly: the whole text without a cache, one run for each row.
    """

    def __init__(self, cache: KVCache, length: int) -> None:
        """length: how many of row 0's positions are shared. The tensors are the cache's own, not copies."""
        if not 0 <= length <= int(cache.lengths[0]):
            raise ValueError(f"cache row 0 holds {int(cache.lengths[0])} positions, not {length}")
        vars(self).update(vars(cache))
        self.length = length
        self._staged = None

    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the shared positions followed by these: [b, h, s, d] each, b as in k and v."""
        return self._joined(self.keys[layer], k), self._joined(self.values[layer], v)

    def _joined(self, held: Tensor, new: Tensor) -> Tensor:
        return torch.cat([held[:1, :, : self.length].expand(len(new), -1, -1, -1), new], dim=2)
