"""Writes new keys and values into a preallocated cache, and frees slots, on plain tensors, for many cache rows at once.

`kvcache.cache.KVCache` raises an error for a bad argument. On a GPU, an error would have to wait for the device. So
these functions leave a cache row with invalid numbers unchanged, and report it.
"""

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from cacheprobe.core.records import PROVENANCES

FREE = PROVENANCES.index("free")


def store_kv(
    k: Float[Tensor, "b g t dk"],
    v: Float[Tensor, "b g t dv"],
    keys: Float[Tensor, "r g s dk"],
    values: Float[Tensor, "r g s dv"],
    codes: UInt8[Tensor, "r s"],
    lengths: Int[Tensor, "r"],
    rows: Int[Tensor, "b"],
    starts: Int[Tensor, "b"],
    counts: Int[Tensor, "b"],
    provenance: int | None = None,
) -> Bool[Tensor, "b"]:
    """Writes the keys and values of token slot t of batch index b to slot starts[b] + t of cache row rows[b]. Pads are
    written too, and stay masked.

    keys, values: of one layer, changed in place.  codes, lengths: the ledger, changed if a provenance is given: the
    first counts[b] slots hold real tokens and are marked.  rows: each cache row at most once.
    Returns refused [b]: True for a batch index of which nothing was written, since its cache row or slots lie outside
    the cache or would leave a hole, or counts[b] exceeds t.
    Twin: kvcache.cache.KVCache: `write` and `extend`, == (tests.kvcache.test_cache_rows).
    """
    refused = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
    width, (num_rows, _, capacity, _) = k.shape[2], keys.shape
    for b, (row, start, count) in enumerate(zip(rows.tolist(), starts.tolist(), counts.tolist(), strict=True)):
        if not (0 <= row < num_rows and 0 <= count <= width and 0 <= start <= int(lengths[row])):
            refused[b] = True
        elif start + width > capacity:
            refused[b] = True
        else:
            keys[row, :, start : start + width] = k[b]
            values[row, :, start : start + width] = v[b]
            if provenance is not None:
                codes[row, start : start + count] = provenance
                lengths[row] = max(int(lengths[row]), start + count)
    return refused


def truncate_rows(
    codes: UInt8[Tensor, "r s"],
    hidden: Bool[Tensor, "r s"],
    lengths: Int[Tensor, "r"],
    rows: Int[Tensor, "b"],
    new_lengths: Int[Tensor, "b"],
) -> Bool[Tensor, "b"]:
    """Frees the slots of cache row rows[b] from new_lengths[b] on: they become free in the ledger, and are no longer
    hidden.

    Changes the ledger in place; keys and values stay, stale and masked.  rows: each cache row at most once.
    Returns refused [b]: True for a row outside the cache, or whose new length is negative or larger; such a row was not
    changed.
    Twin: kvcache.cache.KVCache.truncate, == (tests.kvcache.test_cache_rows).
    """
    refused = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
    for b, (row, length) in enumerate(zip(rows.tolist(), new_lengths.tolist(), strict=True)):
        if not (0 <= row < len(lengths) and 0 <= length <= int(lengths[row])):
            refused[b] = True
        else:
            codes[row, length : int(lengths[row])] = FREE
            hidden[row, length:] = False
            lengths[row] = length
    return refused
