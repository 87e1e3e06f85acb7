"""Rollback of what a Thinking States model remembers: keys, values, H, S and Z, at and between chunk boundaries."""

import random
from collections.abc import Sequence

import pytest
import torch

from cacheprobe.models.thinking.cache import RowThought, ThinkingCache
from cacheprobe.models.thinking.lm import ThinkingLM
from cacheprobe.ops.equality import bitwise
from tests.thinking.test_thinking import VARIANTS, opened, text, tiny

GROWN, DRAFT = 14, 7
VOCABULARY = range(2, 19)


def read(
    lm: ThinkingLM, cache: ThinkingCache, ids: Sequence[int], start: int, provenance: str
) -> tuple[torch.Tensor, list[RowThought]]:
    """One pass, as the engine makes it: the forward, then what of it is real."""
    logits = lm.forward(torch.tensor([ids]), cache, [0], [start])[0]
    cache.extend(0, start, start + len(ids), provenance)
    return logits, cache.take_thoughts()


def one_by_one(lm: ThinkingLM, cache: ThinkingCache, ids: Sequence[int], start: int, end: int):
    """Logits and thoughts of single tokens: the same shapes wherever it begins, so the same bits are asked for."""
    made = [read(lm, cache, ids[at : at + 1], at, "decoded") for at in range(start, end)]
    return torch.cat([logits for logits, _ in made]), [thought for _, thoughts in made for thought in thoughts]


def held(cache: ThinkingCache, length: int, chunk: int) -> list[torch.Tensor]:
    """All that positions before `length` are remembered by: states reach to the end of the chunk that is being filled,
    and to that of the next where a chunk has just ended."""
    reach = (length // chunk + 1) * chunk
    slots = [kept[0, :, :length] for kept in (*cache.keys, *cache.values)]
    of_thoughts = cache.layer_outputs[0, :length], cache.chunk_states[0, chunk:reach]
    return [*slots, *of_thoughts, cache.ledger.codes[0], cache.lengths]


def assert_same_thoughts(mine: list[RowThought], wanted: list[RowThought]) -> None:
    assert [(t.end, t.token_ids, t.has_ended, t.logprobs) for t in mine] == [
        (t.end, t.token_ids, t.has_ended, t.logprobs) for t in wanted
    ]
    for thought, other in zip(mine, wanted, strict=True):
        assert bitwise(thought.state, other.state) and bitwise(thought.first_logits, other.first_logits)


@pytest.mark.parametrize("to", range(4, GROWN + 1))
@pytest.mark.parametrize("variant, prompt", [("while-decoding", 4), ("paper", 40), ("first-state", 9)])
def test_a_rollback_restores_states_thoughts_and_half_filled_chunks(variant: str, prompt: int, to: int) -> None:
    """To every length from one whole chunk to a half-filled fourth, after a wrong draft over two boundaries: the cache
    holds the bits of one that never read further, and goes on with the same bits."""
    model, ids = tiny(**VARIANTS[variant]), text(26)
    chunk = model.config.chunk
    lm, cache = opened(model, prompt)
    _, kept = one_by_one(lm, cache, ids, 0, GROWN)
    dice = random.Random(to)
    _, lost = read(lm, cache, [dice.choice(VOCABULARY) for _ in range(DRAFT)], GROWN, "provisional")
    if variant == "while-decoding":
        assert len(lost) == 2 and cache.chunk_states[0, GROWN + DRAFT - 1].any()  # the draft did think
    cache.truncate(0, to)
    assert cache.take_thoughts() == []

    fresh_lm, fresh = opened(model, prompt)
    _, wanted_before = one_by_one(fresh_lm, fresh, ids, 0, to)
    assert_same_thoughts([thought for thought in kept if thought.end < to], wanted_before)
    assert all(bitwise(a, b) for a, b in zip(held(cache, to, chunk), held(fresh, to, chunk), strict=True))
    cache.check_integrity()

    logits, thoughts = one_by_one(lm, cache, ids, to, len(ids))
    wanted, wanted_thoughts = one_by_one(fresh_lm, fresh, ids, to, len(ids))
    assert bitwise(logits, wanted)
    assert_same_thoughts(thoughts, wanted_thoughts)
    whole = held(cache, len(ids), chunk), held(fresh, len(ids), chunk)
    assert all(bitwise(a, b) for a, b in zip(*whole, strict=True))


def test_what_a_draft_left_beyond_the_length_matters_to_nobody() -> None:
    """Truncated slots are stale, H and S too; poison there changes no bit of what is read later."""
    model, ids = tiny(**VARIANTS["while-decoding"]), text(26)
    found = []
    for poison in (0.0, 1e4):
        lm, cache = opened(model, 4)
        one_by_one(lm, cache, ids, 0, 10)
        read(lm, cache, text(DRAFT, 5), 10, "provisional")
        cache.truncate(0, 10)
        cache.layer_outputs[0, 10:] += poison
        cache.chunk_states[0, 12:] += poison  # the half-filled chunk is 8 to 11: its state is of committed tokens
        found.append(one_by_one(lm, cache, ids, 10, 26))
    assert bitwise(found[0][0], found[1][0])
    assert_same_thoughts(found[0][1], found[1][1])


def test_a_row_that_is_copied_takes_states_and_half_a_chunk_along() -> None:
    model, ids = tiny(**VARIANTS["while-decoding"]), text(26)
    lm, cache = opened(model, 4, rows=2)
    one_by_one(lm, cache, ids, 0, 10)
    cache.copy_row(0, 1, 10)
    mine = [lm.forward(torch.tensor([ids[at : at + 1]]), cache, [1], [at])[0] for at in range(10, 26)]
    alone, fresh = opened(model, 4, rows=2)
    wanted, _ = one_by_one(alone, fresh, ids, 0, 26)
    assert bitwise(torch.cat(mine), wanted[10:])
