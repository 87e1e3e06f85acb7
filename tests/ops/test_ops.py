"""Sampling, acceptance, equality and readout against their slow twins."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cacheprobe.core.noise import derive_seed, gumbel_noise, uniform_noise
from cacheprobe.ops.acceptance import StopRule, clip_draft, num_accepted
from cacheprobe.ops.equality import bitwise, close
from cacheprobe.ops.readout import BLOCK, best_of_blocks, read_logits
from cacheprobe.ops.sampling import sample_token, two_largest
from tests.twins.equivalence import lowest_topk_slowly, num_accepted_slowly, read_logits_slowly, sample_token_slowly

tokens = st.lists(st.integers(0, 3), max_size=8)


@given(tokens, tokens)
def test_num_accepted_equals_its_twin(draft: list[int], targets: list[int]) -> None:
    targets = targets + [9] * (len(draft) + 1 - len(targets))
    assert num_accepted(draft, targets) == num_accepted_slowly(draft, targets)


@given(tokens, st.integers(-1, 5))
def test_clip_draft_ends_at_the_first_stop(draft: list[int], limit: int) -> None:
    kept = clip_draft((), draft, StopRule(frozenset({2}), (), str), limit)
    assert list(kept) == draft[: len(kept)] and len(kept) <= max(limit, 0)
    assert 2 not in kept[:-1]
    if len(kept) < min(len(draft), max(limit, 0)):
        assert kept[-1] == 2


@given(st.lists(st.integers(0, 2), min_size=2, max_size=12), st.sampled_from([0.0, 0.7, 1.5]), st.integers(0, 2**70))
def test_sample_token_equals_its_twin(values: list[int], temperature: float, seed: int) -> None:
    """Integers as logits: ties everywhere, so that the lowest id is put to the test at temperature 0."""
    logits = torch.tensor(values, dtype=torch.bfloat16)
    chosen = sample_token(logits, temperature, seed, position=11)
    assert chosen == sample_token_slowly(logits, temperature, seed, 11)


def test_sample_token_refuses_nan() -> None:
    for bad in (torch.nan, torch.inf):
        with pytest.raises(ValueError, match="position 7"):
            sample_token(torch.tensor([0.0, bad]), 0.0, 0, 7)


def test_noise_is_keyed_by_seed_and_position() -> None:
    assert (gumbel_noise(3, 11, 50) == gumbel_noise(3, 11, 50)).all()
    streams = {
        uniform_noise(seed, position, 8).tobytes() for seed in (0, 1, 2**32, 2**64 + 1) for position in range(20)
    }
    assert len(streams) == 80
    assert np.isfinite(gumbel_noise(5, 5, 100_000)).all()
    assert len({derive_seed(0, i) for i in range(1000)} | {derive_seed(1, i) for i in range(1000)}) == 2000


@pytest.mark.parametrize("width", [4, 200, 1024, 1300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_best_of_blocks_are_the_best_of_all(dtype: torch.dtype, width: int) -> None:
    """Rounded to a handful of values, so that nearly every place is a tie; `topk` itself fails this."""
    values = (torch.randn(40, width, generator=torch.Generator().manual_seed(0)) * 2).round().to(dtype).float()
    values[7], values[8, 1:] = 1.0, -torch.inf  # all alike, and nothing but a pad's own value behind the first
    values[9, -1] = 100.0
    maxima = torch.stack([block.amax(-1) for block in values.split(BLOCK, dim=1)], dim=1)
    ours, slow = best_of_blocks(values, maxima, 5), lowest_topk_slowly(values, 5)
    assert torch.equal(ours[0], slow[0]) and torch.equal(ours[1], slow[1])
    assert width == 4 or not torch.equal(values.topk(5).indices, slow[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_reading_in_tiles_of_ids_equals_its_twin(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few distinct values, so that targets have equals in their own tile and in others; ids that cannot occur; lines
    without a target."""
    monkeypatch.setattr("cacheprobe.ops.readout._IDS_AT_ONCE", 256)
    generator = torch.Generator().manual_seed(2)
    logits = (torch.randn(66, 700, generator=generator) * 3).round().to(dtype)
    logits[5, :300] = -torch.inf
    logits[6] = -torch.inf
    logits[6, 650] = 2.0
    logits[7] += torch.arange(700) / 8  # each tile holds a larger value than those before it
    logits[8] = 60.0 - logits[7]
    targets = torch.randint(0, 700, (66,), generator=generator)
    targets[:9] = torch.tensor([0, 255, 256, 699, -1, 20, 10, 300, 300])
    ours, slow = read_logits(logits, targets, 5), read_logits_slowly(logits, targets, 5)
    assert torch.equal(ours.top_token_ids, slow["ids"]) and torch.equal(ours.target_rank, slow["rank"])
    why = "float32 sums against float64"
    assert close(ours.entropy_nats, slow["entropy"], 1e-5, because=why)
    has_target = targets >= 0
    assert ours.target_logprob_nats.isnan().tolist() == (~has_target).tolist() and 0 < int(has_target.sum()) < 66
    told = has_target & slow["target_logprob"].isfinite()
    assert close(ours.target_logprob_nats[told], slow["target_logprob"][told], 1e-5, because=why)
    is_finite = slow["logprobs"].isfinite()
    assert torch.equal(ours.top_logprob_nats.isfinite(), is_finite)
    assert close(ours.top_logprob_nats[is_finite], slow["logprobs"][is_finite], 1e-5, because=why)


def test_a_reading_is_batch_invariant() -> None:
    """A row in a tile of fixed height: wherever it stands, whatever is beside it, every bit is the same."""
    generator = torch.Generator().manual_seed(4)
    states, weight = torch.randn(96, 64, generator=generator).bfloat16(), torch.randn(5003, 64, generator=generator)
    targets = torch.randint(-1, 5003, (96,), generator=generator)

    def read(order: torch.Tensor) -> list[torch.Tensor]:
        logits = torch.nn.functional.linear(states[order], weight.bfloat16())
        return [column[order.argsort()] for column in read_logits(logits, targets[order], 5)]

    expected = read(torch.arange(96))
    for _ in range(3):
        again = read(torch.randperm(96, generator=generator))
        assert all(bitwise(ours, theirs) for ours, theirs in zip(again, expected, strict=True))


def test_bitwise_tells_what_equality_hides() -> None:
    zero, nan = torch.tensor(0.0), torch.tensor(torch.nan)
    assert not bitwise(zero, -zero) and bitwise(nan, nan)
    assert not bitwise(zero, zero.double()) and not bitwise(zero, zero[None])


def test_close_needs_a_reason_and_sees_nan() -> None:
    with pytest.raises(ValueError, match="reason"):
        close(torch.ones(1), torch.ones(1), 1e-5, because="")
    assert not close(torch.tensor([math.nan]), torch.ones(1), 1.0, because="NaN is close to nothing")


@given(st.lists(st.floats(-5, 5, width=16).map(lambda x: round(x, 1)), min_size=2, max_size=9))
def test_two_largest_equals_its_twin(values: list[float]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        given_values = torch.tensor(values).to(dtype)
        assert two_largest(given_values) == tuple(given_values.topk(2).values.tolist())
