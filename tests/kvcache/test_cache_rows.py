"""Many cache rows at once, on plain tensors, against the cache and the books that the engine keeps."""

from typing import Any

import pytest
import torch

import cacheprobe as cp
from cacheprobe.core.records import Verdict
from cacheprobe.engine.committer import Committer
from cacheprobe.kvcache.cache import KVCache
from cacheprobe.kvcache.ledger import CODES, CacheIntegrityError
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.ops.cache_rows import FREE, store_kv, truncate_rows
from cacheprobe.ops.equality import bitwise
from cacheprobe.ops.verdicts import FINISHES, VERIFIED, apply_verdicts
from tests.tiny import PROMPTS, SMALL, loaded


def filled(rows: int = 4, capacity: int = 16) -> KVCache:
    """A cache with rows of lengths 0, 3, 6 and 9, each with a hidden slot."""
    cache = KVCache(rows, capacity, [(2, 4, 6)], torch.float32)
    generator = torch.Generator().manual_seed(0)
    for held in (*cache.keys, *cache.values):
        held[:] = torch.randn(held.shape, generator=generator)
    for row in range(rows):
        cache.allocate()
        cache.extend(row, 0, 3 * row, "prefill")
        cache.hidden[row, : 3 * row : 4] = True
    return cache


def held(cache: KVCache) -> list[torch.Tensor]:
    return [cache.keys[0], cache.values[0], cache.ledger.codes, cache.lengths, cache.hidden]


def test_codes_are_the_ledgers() -> None:
    assert CODES["free"] == FREE and CODES["verified"] == VERIFIED


@pytest.mark.parametrize("provenance", [None, "decoded"])
def test_rows_are_stored_as_the_cache_stores_them(provenance: str | None) -> None:
    """Pads written and not marked; a hole, an overflow and a row that is none are refused where the cache raises."""
    theirs, mine = filled(), filled()
    rows, starts, counts = [2, 0, 3, 1, 7], [5, 0, 11, 3, 0], [3, 2, 1, 0, 1]
    k, v = torch.randn(5, 2, 3, 4), torch.randn(5, 2, 3, 6)
    with pytest.raises(CacheIntegrityError, match="cannot take slots 11"):
        theirs.extend(3, 11, 12, "decoded")
    good = [0, 1, 3]
    theirs.stage([rows[b] for b in good], [starts[b] for b in good], 3)
    theirs.write(0, k[good], v[good])
    for b in good:
        if provenance is not None:
            theirs.extend(rows[b], starts[b], starts[b] + counts[b], provenance)
    where = [torch.tensor(one) for one in (rows, starts, counts)]
    code = None if provenance is None else CODES[provenance]
    refused = store_kv(k, v, *held(mine)[:4], *where, code)
    assert refused.tolist() == [False, False, True, False, True]
    assert all(bitwise(a, b) for a, b in zip(held(mine), held(theirs), strict=True))
    full = torch.tensor([2]), torch.tensor([6]), torch.tensor([1])
    wide = torch.randn(1, 2, 11, 4), torch.randn(1, 2, 11, 6)
    assert store_kv(*wide, *held(mine)[:4], *full).tolist() == [True]  # 6 + 11 leave the capacity of 16


def test_rows_are_truncated_as_the_cache_truncates_them() -> None:
    theirs, mine = filled(), filled()
    theirs.truncate(3, 4)
    theirs.truncate(1, 0)
    with pytest.raises(CacheIntegrityError, match="cannot truncate"):
        theirs.truncate(2, 7)
    asked = torch.tensor([3, 2, 1, -1]), torch.tensor([4, 7, 0, 0])
    refused = truncate_rows(mine.ledger.codes, mine.hidden, mine.lengths, *asked)
    assert refused.tolist() == [False, True, False, True]
    assert all(bitwise(a, b) for a, b in zip(held(mine), held(theirs), strict=True))
    mine.check_integrity()


def test_drafts_are_settled_as_the_books_settle_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every verdict of real runs: recovered and bonus tokens, stops and lengths, the ledger before and after."""
    seen: list[tuple[bool, str | None]] = []
    right = Committer.apply_verdict

    def both(self: Committer, state: SequenceState, verdict: Verdict) -> None:
        cache, last_committed_position, row = self.cache, state.last_committed_position, state.cache_row
        ledger = [cache.ledger.codes.clone(), cache.hidden.clone(), cache.lengths.clone()]
        text = torch.full((cache.rows, cache.capacity + 1), -5)
        text[row, : len(state.token_ids)] = torch.tensor(state.token_ids)
        draft, chosen = list(verdict.draft_token_ids), list(verdict.target_token_ids)
        stops = sorted(state.stop_rule.token_ids)
        numbers = ([len(draft)], [len(chosen)], [state.num_left], [stops], [last_committed_position], [row])
        drafts, targets = torch.tensor([[*draft, 9]]), torch.tensor([[*chosen, *[9] * (len(draft) + 2 - len(chosen))]])
        drafted, chose, left, stop, front, rows = (torch.tensor(one, dtype=torch.long) for one in numbers)
        got = apply_verdicts(drafts, drafted, targets, chose, left, stop, front, rows, text, *ledger)
        right(self, state, verdict)
        count = verdict.num_committed
        assert (int(got.num_accepted), int(got.num_committed)) == (verdict.num_accepted, count)
        assert FINISHES[int(got.finish)] == verdict.finish
        assert got.committed[0].tolist() == [*verdict.committed, *[-1] * (targets.shape[1] - count)]
        assert text[row, : len(state.token_ids)].tolist() == state.token_ids
        after = [cache.ledger.codes, cache.hidden, cache.lengths]
        assert all(bitwise(a, b) for a, b in zip(ledger, after, strict=True))
        seen.append((verdict.is_rollback, verdict.finish))

    monkeypatch.setattr(Committer, "apply_verdict", both)
    model = loaded()
    plain = cp.run(model, PROMPTS, **SMALL)
    stops = {plain.committed(0)[4], plain.committed(2)[2]}
    for settings in ({}, {"sampling": cp.SamplingParams(stop_token_ids=stops)}):
        cp.run(model, PROMPTS, **SMALL, **settings, drafter=cp.drafters.EarlyExit(layer=1))
    assert {True, False} == {rolled for rolled, _ in seen} and {None, "stop", "length"} == {end for _, end in seen}


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": [9]}, {"rows": [-1]}, {"last_positions": [8]}, {"num_left": [-1]}, {"draft_lengths": [4]},
        {"draft_lengths": [-1]}, {"target_lengths": [1]}, {"target_lengths": [4]},
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_and_touches_nothing(changes: dict[str, Any]) -> None:
    cache = filled()
    numbers: dict[str, Any] = {
        "drafts": [[1, 2, 3]], "draft_lengths": [2], "targets": [[1, 2, 3]], "target_lengths": [3], "num_left": [5],
        "stop_token_ids": [[-1]], "last_positions": [5], "rows": [2],
    }  # fmt: skip
    given = {name: torch.tensor(value) for name, value in {**numbers, **changes}.items()}
    text = torch.zeros(4, 17, dtype=torch.long)
    ledger = {"codes": cache.ledger.codes, "hidden": cache.hidden, "lengths": cache.lengths}
    got = apply_verdicts(**given, token_ids=text, **ledger)
    assert [one.tolist() for one in got] == [[-1], [-1], [-1], [[-1, -1, -1]]]
    assert not text.any() and all(bitwise(a, b) for a, b in zip(held(cache), held(filled()), strict=True))
    settled = apply_verdicts(**{n: torch.tensor(v) for n, v in numbers.items()}, token_ids=text, **ledger)
    assert settled.committed.tolist() == [[1, 2, 3]] and int(cache.lengths[2]) == 8
