"""Keys and values of many cache rows at once, on plain tensors, against the cache that the engine keeps."""

import torch

from cacheprobe.kvcache.cache import KVCache
from cacheprobe.kvcache.staged import StagedCache
from cacheprobe.ops.equality import bitwise
from cacheprobe.ops.references import store_kv


def filled(rows: int = 5, capacity: int = 16) -> KVCache:
    cache = KVCache(rows, capacity, [(2, 4, 6)], torch.float32)
    generator = torch.Generator().manual_seed(0)
    for held in (*cache.keys, *cache.values):
        held[:] = torch.randn(held.shape, generator=generator)
    return cache


def test_rows_are_stored_as_the_cache_stores_them() -> None:
    """Pads written too; slots beyond the capacity and a row that is none are left out where the cache raises."""
    theirs, mine = filled(), filled()
    rows, starts = [2, 0, 3, 1, 7, -1, 4], [5, 0, 13, 14, 0, 0, -1]
    k, v = torch.randn(7, 2, 3, 4), torch.randn(7, 2, 3, 6)
    good = [0, 1, 2]
    StagedCache(theirs, [rows[b] for b in good], [starts[b] for b in good], 3).write(0, k[good], v[good])
    store_kv(k, v, mine.keys[0], mine.values[0], torch.tensor(rows), torch.tensor(starts))
    assert bitwise(mine.keys[0], theirs.keys[0]) and bitwise(mine.values[0], theirs.values[0])
    assert not bitwise(mine.keys[0], filled().keys[0])
