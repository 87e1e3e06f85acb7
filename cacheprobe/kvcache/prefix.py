"""One cache row's first positions under a whole batch: many continuations attend to them, none writes them."""

import torch
from torch import Tensor

from cacheprobe.kvcache.cache import KVCache


class SharedPrefix(KVCache):
    """What a cache row holds of its first positions, for forwards that continue it with a batch of any height.

    A forward is staged for one row and may carry more: models broadcast masks and positions over the batch. Each row
    of the batch attends to the shared positions and to itself; nothing is written, so the cache can be shared again.
    Twin: tests.patching_slowly: the whole text without a cache, one run for each row.
    """

    def __init__(self, cache: KVCache, length: int) -> None:
        """length: how many of row 0's positions are shared. The tensors stay the cache's own."""
        if not 0 <= length <= int(cache.lengths[0]):
            raise ValueError(f"cache row 0 holds {int(cache.lengths[0])} positions, not {length}")
        vars(self).update(vars(cache))
        self.length = length
        self._staged = None

    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The shared positions, then these: [b, h, s, d] each, b as in k and v."""
        return self._joined(self.keys[layer], k), self._joined(self.values[layer], v)

    def _joined(self, held: Tensor, new: Tensor) -> Tensor:
        return torch.cat([held[:1, :, : self.length].expand(len(new), -1, -1, -1), new], dim=2)
