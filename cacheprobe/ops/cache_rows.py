"""Writes new keys and values into a preallocated cache, for many cache rows at once."""

from jaxtyping import Float, Int
from torch import Tensor


def store_kv(
    k: Float[Tensor, "b g t dk"],
    v: Float[Tensor, "b g t dv"],
    keys: Float[Tensor, "r g s dk"],
    values: Float[Tensor, "r g s dv"],
    rows: Int[Tensor, "b"],
    starts: Int[Tensor, "b"],
) -> None:
    """Writes the keys and values of token slot t of batch index b to slot starts[b] + t of cache row rows[b], in place.

    keys, values: of one layer.  rows: each cache row at most once. A batch index whose cache row or slots lie outside
    the cache is left out: on a GPU, an error would have to wait for the device.
    Twin: kvcache.staged.StagedCache.store without a `writer`, == (tests.kvcache.test_cache_rows).
    """
    width, (num_rows, _, capacity, _) = k.shape[2], keys.shape
    for b, (row, start) in enumerate(zip(rows.tolist(), starts.tolist(), strict=True)):
        if 0 <= row < num_rows and 0 <= start <= capacity - width:
            keys[row, :, start : start + width] = k[b]
            values[row, :, start : start + width] = v[b]
