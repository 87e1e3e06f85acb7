"""The KV cache alone: positions, lengths, the ledger, and what it refuses."""

import pytest
import torch

from cacheprobe.kvcache.cache import KVCache
from cacheprobe.kvcache.ledger import CacheIntegrityError
from cacheprobe.kvcache.staged import PassAttention, StagedCache


def make(rows: int = 3, capacity: int = 16) -> KVCache:
    return KVCache(rows, capacity, [(2, 4, 4), (2, 4, 6)], torch.float32)


def test_contiguous_rows_are_a_view_and_others_a_copy() -> None:
    cache = make()
    k = torch.randn(2, 2, 1, 4)
    for rows, is_view in (([0, 1], True), ([0, 2], False)):
        keys, _ = StagedCache(cache, rows, [0, 0], 1).write(0, k, k)
        assert (keys.data_ptr() == cache.keys[0].data_ptr()) == is_view


def test_pads_must_fit_and_the_message_names_the_number() -> None:
    with pytest.raises(ValueError, match="set capacity=18"):
        StagedCache(make(), [0], [14], 4)
    with pytest.raises(ValueError, match="each row once"):
        cache = make()
        StagedCache(cache, [1, 1], [0, 0], 1)  # a free row holds dummies, of which nothing is read
        StagedCache(cache, [cache.allocate()] * 2, [0, 0], 1)
    with pytest.raises(CacheIntegrityError, match="for staged"):
        StagedCache(make(), [0], [0], 1).write(0, torch.zeros(1, 2, 2, 4), torch.zeros(1, 2, 2, 4))


@pytest.mark.parametrize(
    "damage",
    [
        lambda cache: cache.ledger.codes.__setitem__((0, 2), 0),  # a hole
        lambda cache: cache.lengths.__setitem__(0, 9),  # a length that the ledger does not know
        lambda cache: cache.lengths.__setitem__(1, 1),  # a free row in use
        lambda cache: cache.values[1].__setitem__((2, 0, 15, 0), torch.nan),  # poison in a masked slot
    ],
)
def test_check_integrity_sees_damage(damage) -> None:
    cache = make()
    cache.extend(cache.allocate(), 0, 5, "prefill")
    cache.check_integrity()
    damage(cache)
    with pytest.raises(CacheIntegrityError):
        cache.check_integrity()


def test_large_numbers_are_finite() -> None:
    """Their sum is not, and that is no damage."""
    cache = make()
    cache.keys[0][:] = torch.finfo(torch.float32).max
    cache.check_integrity()
    cache.keys[0][1, 1, 3] = -torch.inf
    with pytest.raises(CacheIntegrityError, match="layer 0: the cache's keys"):
        cache.check_integrity()


@pytest.mark.parametrize("rows", [[0, 1], [2, 0]])
def test_attention_may_run_over_what_is_in_use(rows: list[int]) -> None:
    """Keys, values and mask end together."""
    cache = make(capacity=100)
    k = torch.randn(2, 2, 1, 4)
    for slots, span in ((1, 32), (32, 32), (33, 64), (97, 100)):
        staged = StagedCache(cache, rows, [0, slots - 1], 1, PassAttention(slots))
        keys, values = staged.write(0, k, k)
        mask = staged.mask(torch.float32, "cpu")
        assert {keys.shape[2], values.shape[2], mask.shape[3]} == {span} and keys.shape[0] == 2
        assert torch.equal(keys, cache.keys[0][rows, :, :span]) and torch.equal(keys[1, :, slots - 1], k[1, :, 0])
        assert int((mask[1] == 0).sum()) == slots
    assert StagedCache(cache, rows, [0, 0], 1).span == 100


def test_impossible_moves_are_refused() -> None:
    cache = make()
    row = cache.allocate()
    cache.extend(row, 0, 4, "prefill")
    with pytest.raises(CacheIntegrityError):
        cache.truncate(row, 5)
    with pytest.raises(CacheIntegrityError):
        cache.extend(row, 5, 6, "decoded")
    cache.release(row)
    with pytest.raises(CacheIntegrityError, match="twice"):
        cache.release(row)
