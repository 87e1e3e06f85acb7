"""The distribution a request draws from: against transformers' own processors, a slow twin, and its own draws."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from cacheprobe.core.records import SamplingParams
from cacheprobe.ops.equality import bitwise, close
from cacheprobe.ops.sampling import choose_token, target_probs, target_scores
from tests.twins.equivalence import choose_token_slowly, target_scores_slowly

SETTINGS = [
    dict(),
    dict(top_k=1),
    dict(top_k=7),
    dict(top_k=1000),
    dict(top_p=0.01),
    dict(top_p=0.5),
    dict(top_p=0.999),
    dict(min_p=0.1),
    dict(min_p=1.0),
    dict(repetition_penalty=1.3),
    dict(repetition_penalty=0.5),
    dict(top_k=20, top_p=0.8),
    dict(top_p=0.8, min_p=0.05),
    dict(top_k=30, top_p=0.9, min_p=0.02, repetition_penalty=1.2),
]
PREFIX = [3, 3, 17, 90, 4, 3]


def transformers_scores(logits: torch.Tensor, sampling: SamplingParams, prefix: list[int]) -> torch.Tensor:
    """Hugging Face's processors in the order in which `generate` lists them, over float64."""
    steps = LogitsProcessorList()
    if sampling.repetition_penalty is not None:
        steps.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    steps.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        steps.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p is not None:
        steps.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p is not None:
        steps.append(MinPLogitsWarper(sampling.min_p))
    return steps(torch.tensor([prefix]), logits.double()[None])[0]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_ties_the_scores_are_transformers(settings: dict, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for temperature in (0.7, 1.0, 2.5):
        for width in (2, 97, 200):
            logits = torch.randn(width, generator=generator).mul(3).to(dtype).unique()  # no two are equal
            logits = logits[torch.randperm(len(logits), generator=generator)]
            sampling = SamplingParams(temperature=temperature, **settings)
            prefix = [token_id % len(logits) for token_id in PREFIX]
            ours, theirs = target_scores(logits, sampling, prefix), transformers_scores(logits, sampling, prefix)
            assert bitwise(ours, theirs)
            why = "sums of exponentials in another order"
            assert close(target_probs(logits, sampling, prefix), theirs.softmax(0), 1e-14, because=why)


@st.composite
def tied_logits(draw: st.DrawFn) -> torch.Tensor:
    """Few different values in bfloat16, so that every threshold falls among equals; now and then a forbidden token."""
    values = draw(st.lists(st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.0, -math.inf]), min_size=1, max_size=24))
    return torch.tensor([draw(st.sampled_from([0.0, 1.0])), *values], dtype=torch.bfloat16)


settings_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    seed=st.integers(0, 2**70),
    top_k=st.none() | st.integers(0, 30),
    top_p=st.none() | st.sampled_from([0.05, 0.31, 0.5, 0.77, 0.99, 1.0]),
    min_p=st.none() | st.sampled_from([0.0, 0.01, 0.3, 0.9, 1.0]),
    repetition_penalty=st.none() | st.sampled_from([0.5, 1.0, 1.3]),
)
prefixes = st.lists(st.integers(0, 1), max_size=4)


@given(tied_logits(), settings_strategy, prefixes)
def test_with_ties_the_scores_are_the_twins(logits: torch.Tensor, sampling: SamplingParams, prefix: list[int]) -> None:
    before = logits.clone()
    assert target_scores(logits, sampling, prefix).tolist() == target_scores_slowly(logits, sampling, prefix)
    assert choose_token(logits, sampling, prefix, 11) == choose_token_slowly(logits, sampling, prefix, 11)
    assert bitwise(logits, before)


def test_top_p_stops_where_it_is_reached() -> None:
    """Four equal tokens hold a quarter each, exactly: half of the probability is two of them, the lowest ids."""
    for top_p, kept in ((0.25, 1), (0.5, 2), (0.51, 3), (0.75, 3), (0.76, 4)):
        sampling = SamplingParams(temperature=1.0, top_p=top_p)
        scores = target_scores(torch.ones(4), sampling, [])
        assert scores.tolist() == [1.0] * kept + [-math.inf] * (4 - kept)
        assert int((transformers_scores(torch.ones(4), sampling, [0]) > -math.inf).sum()) == kept


@pytest.mark.parametrize("settings", [dict(), dict(top_k=2), dict(top_p=0.5), dict(repetition_penalty=2.0)], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_no_distribution_is_refused(settings: dict, temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, **settings)
    for bad in ([0.0, math.nan], [math.inf, 0.0], [-math.inf, -math.inf]):
        with pytest.raises(ValueError, match="position 7"):
            choose_token(torch.tensor(bad), sampling, [0], 7)
        with pytest.raises(ValueError, match="NaN|inf"):
            target_scores(torch.tensor(bad), sampling, [0])
    assert choose_token(torch.tensor([-math.inf, 0.0]), sampling, [0], 7) == 1


def test_nothing_but_the_arguments_matters() -> None:
    """Not the number of threads, nor the memory in which the logits lie, nor torch's generator."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(49152, generator=generator)
    sampling = SamplingParams(temperature=0.8, seed=3, top_k=4000, top_p=0.9, min_p=0.001, repetition_penalty=1.1)
    want, threads = target_scores(logits, sampling, PREFIX), torch.get_num_threads()
    strided = torch.stack([logits, logits], dim=1)[:, 1]
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            torch.manual_seed(count)
            assert bitwise(target_scores(strided, sampling, tuple(PREFIX)), want)
            assert bitwise(target_scores(logits.double(), sampling, PREFIX), want)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "settings",
    [dict(top_k=5, top_p=0.8), pytest.param(dict(min_p=0.2, repetition_penalty=1.8), marks=pytest.mark.slow)],
    ids=str,
)
def test_draws_follow_the_probabilities(settings: dict) -> None:
    """20,000 positions: Pearson's statistic stays below its 1-in-10,000 value, against plain probabilities it does
    not, and what is removed is never drawn."""
    logits = torch.tensor([0.5, -1.0, 1.5, 0.0, 0.9, -0.3, 1.1])
    sampling = SamplingParams(temperature=0.8, seed=5, **settings)
    draws = [choose_token(logits, sampling, [2, 4], position) for position in range(20_000)]
    counts = np.bincount(draws, minlength=7)

    def statistic(probs: torch.Tensor) -> float:
        expected = probs.numpy() * len(draws)
        assert not counts[expected == 0].any()
        return float((((counts - expected) ** 2)[expected > 0] / expected[expected > 0]).sum())

    limit = 27.9  # chi-square with 6 degrees of freedom, p = 1e-4; filters leave fewer, for which it is stricter
    assert statistic(target_probs(logits, sampling, [2, 4])) < limit
    assert statistic((logits / 0.8).double().softmax(0)) > 10 * limit
