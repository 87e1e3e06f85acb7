"""Speculative sampling leaves the target distribution as it is: by algebra, and by a slow twin of its draws."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cacheprobe.core.noise import (
    ACCEPT_STREAM,
    CHOICE_STREAM,
    DRAFT_STREAM,
    RECOVER_STREAM,
    gumbel_noise,
    uniform_noise,
)
from cacheprobe.ops import acceptance as rejection
from cacheprobe.ops.acceptance import accept_or_recover, acceptance_prob, recovery_probs
from tests.twins.equivalence import accept_or_recover_slowly


def probs(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def simplex(width: int, parts: int) -> list[Tensor]:
    """Every distribution over `width` tokens whose probabilities are multiples of 1 / parts."""
    counts = [c for c in itertools.product(range(parts + 1), repeat=width) if sum(c) == parts]
    return [probs(*(n / parts for n in c)) for c in counts]


def outcome_probs(target: Tensor, draft: Tensor | None, candidate: int) -> Tensor:
    """[v] what comes to stand, where this candidate was drafted."""
    accept = acceptance_prob(float(target[candidate]), 1.0 if draft is None else float(draft[candidate]))
    outcome = torch.zeros_like(target)
    if accept < 1:
        recovery = recovery_probs(target, draft, candidate)
        assert recovery is not None
        outcome += (1 - accept) * recovery
    outcome[candidate] += accept
    return outcome


def test_the_outcome_is_the_target_by_algebra() -> None:
    """Candidates drawn from every draft distribution, zeros included, and candidates that were not drawn at all."""
    grid = simplex(3, 5) + simplex(2, 7)
    for target, draft in itertools.product(grid, grid):
        if len(target) != len(draft):
            continue
        drawn = sum(float(draft[d]) * outcome_probs(target, draft, d) for d in range(len(draft)) if draft[d] > 0)
        assert float((drawn - target).abs().max()) < 1e-12
    for target in grid:
        for candidate in range(len(target)):
            assert float((outcome_probs(target, None, candidate) - target).abs().max()) < 1e-12


distributions = st.integers(2, 6).flatmap(
    lambda width: st.tuples(*[st.lists(st.integers(0, 9), min_size=width, max_size=width).filter(any)] * 2)
)


@given(distributions, st.data())
def test_the_rule_equals_its_twin(weights: tuple[list[int], list[int]], data: st.DataObject) -> None:
    target, draft = (probs(*(n / sum(column) for n in column)) for column in weights)
    is_drawn = data.draw(st.booleans())
    candidate = data.draw(st.sampled_from([i for i in range(len(draft)) if draft[i] > 0 or not is_drawn]))
    seed, position = data.draw(st.integers(0, 2**70)), data.draw(st.integers(0, 2**40))
    ours = accept_or_recover(target, draft if is_drawn else None, candidate, seed, position)
    slow = accept_or_recover_slowly(target.tolist(), draft.tolist() if is_drawn else None, candidate, seed, position)
    assert ours == slow
    assert target[ours[1]] > 0


def test_equal_distributions_accept_everything() -> None:
    """Also where rounding leaves the target a little lower at the candidate and nowhere higher."""
    target = probs(0.1, 0.2, 0.7)
    low = probs(0.1, math.nextafter(0.2, 0), 0.7)
    for position in range(200):
        assert accept_or_recover(target, target.clone(), position % 3, 0, position) == (True, position % 3)
        assert accept_or_recover(low, target, 1, 0, position) == (True, 1)
    assert recovery_probs(low, target, 1) is None
    # a target that is all on the candidate but sums to less than 1, and a chance that falls into the gap
    assert recovery_probs(probs(0.0, 0.5), None, 1) is None
    assert {accept_or_recover(probs(0.0, 0.5), None, 1, 0, position)[0] for position in range(50)} == {True}


def test_the_last_token_takes_what_rounding_leaves(monkeypatch) -> None:
    """21 equal shares add up to less than the largest chance; tokens of probability 0 take nothing of what is left."""
    largest = 1 - 2.0**-53
    monkeypatch.setattr(rejection, "uniform_noise", lambda *key: np.array([largest]))
    target = probs(*[1 / 21] * 21, 0.0, 0.0)
    recovery = recovery_probs(target, None, 22)
    assert recovery is not None and float(np.cumsum(recovery.numpy())[-1]) < largest
    assert accept_or_recover(target, None, 22, 0, 0) == (False, 20)


def test_a_candidate_that_was_never_drawn_is_refused() -> None:
    with pytest.raises(ValueError, match="candidate has probability 0"):
        accept_or_recover(probs(0.5, 0.5), probs(0.0, 1.0), 0, 0, 0)


def test_streams_share_nothing_and_the_first_is_as_ever() -> None:
    words = np.random.Philox(key=5, counter=[0, 9, 0, 0]).random_raw(50)
    assert (uniform_noise(5, 9, 50) == ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52).all()
    streams = (CHOICE_STREAM, DRAFT_STREAM, ACCEPT_STREAM, RECOVER_STREAM)
    held = [uniform_noise(seed, position, 64, s) for seed in (0, 5) for position in range(20) for s in streams]
    assert len(np.unique(np.concatenate(held))) == 2 * 20 * 4 * 64
    assert (gumbel_noise(5, 9, 50) == gumbel_noise(5, 9, 50, CHOICE_STREAM)).all()
