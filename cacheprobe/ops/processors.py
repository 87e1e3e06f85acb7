"""From the model's logits to the log-weights that a request draws from: penalty, temperature, top_k, top_p, min_p.

Knows nothing about requests or positions; noise is added elsewhere. Everything is computed in float64 and by NumPy,
whose sums, unlike torch's, do not depend on the number of threads.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from cacheprobe.core.records import SamplingParams


def target_scores(logits: Float[Tensor, "v"], sampling: SamplingParams, prefix: Sequence[int]) -> Float64[Tensor, "v"]:
    """Log-weights, up to a constant, of the distribution that a request draws its next token from.

    logits: [v] in the model's own dtype.  prefix: prompt and output before this position, for the penalty alone.
    Returns [v] on the CPU, -inf for every token that cannot be drawn. Order and definitions are Hugging Face's, except
    that equal scores rank by the lower id: top_k keeps exactly k tokens, and top_p a set that nothing else decides. At
    temperature 0 nothing is drawn and only the penalty applies, there as here.
    Raises: ValueError on NaN or infinity, or where no token is left.
    Source: repetition penalty, Keskar et al. 2019 (arXiv 1909.05858), section 4.1; top_k, Fan et al. 2018 (1805.04833),
    section 5.4; top_p, Holtzman et al. 2019 (1904.09751), section 3.1; min_p, Nguyen et al. 2024 (2407.01082).
    Twin: tests.equivalence.target_scores_slowly: the same tokens, scores ==; without ties transformers' own processors.
    """
    scores = logits.detach().to("cpu", torch.float64, copy=True).numpy()
    _require_a_best(scores)
    if sampling.repetition_penalty not in (None, 1) and len(prefix):
        _penalise(scores, sampling.repetition_penalty, np.asarray(prefix))
    if not sampling.is_greedy:
        scores /= sampling.temperature
        _require_a_best(scores)
        _filter(scores, sampling)
    return torch.from_numpy(scores)


def target_probs(logits: Float[Tensor, "v"], sampling: SamplingParams, prefix: Sequence[int]) -> Float64[Tensor, "v"]:
    """The distribution itself: softmax of `target_scores`; at temperature 0 all of it on the lowest best token."""
    scores = target_scores(logits, sampling, prefix).numpy()
    if sampling.is_greedy:
        probs = np.zeros_like(scores)
        probs[scores.argmax()] = 1.0  # NumPy's argmax is the first of those that are equal
    else:
        probs = np.exp(scores - scores.max())
        probs /= probs.sum()
    return torch.from_numpy(probs)


def _require_a_best(scores: np.ndarray) -> None:
    best = scores.max()
    if not np.isfinite(best):
        raise ValueError(f"scores to choose from hold {'NaN' if np.isnan(best) else float(best)}")


def _penalise(scores: np.ndarray, penalty: float, token_ids: np.ndarray) -> None:
    """Divide positive and multiply negative scores of the tokens in the prefix; each once, however often it occurs."""
    seen = scores[token_ids]
    scores[token_ids] = np.where(seen < 0, seen * penalty, seen / penalty)


def _filter(scores: np.ndarray, sampling: SamplingParams) -> None:
    """Set to -inf what top_k, top_p and min_p remove, each from what the one before it has left."""
    if sampling.top_k and sampling.top_k < len(scores):
        threshold = np.partition(scores, -sampling.top_k)[-sampling.top_k]
        _keep_best(scores, sampling.top_k, threshold)
    if sampling.top_p not in (None, 1):
        left = np.sort(scores[scores > -np.inf])[::-1]
        weights = np.exp(left - left[0])
        # a token stays where those before it hold less than top_p; the best one always, with nothing before it
        count = 1 + int((weights.cumsum()[:-1] < sampling.top_p * weights.sum()).sum())
        _keep_best(scores, count, left[count - 1])
    if sampling.min_p:
        scores[np.exp(scores - scores.max()) < sampling.min_p] = -np.inf


def _keep_best(scores: np.ndarray, count: int, threshold: float) -> None:
    """Set all but the `count` best to -inf; of those that equal the last one, `threshold`, the lowest ids stay."""
    above = scores > threshold
    tied = np.flatnonzero(scores == threshold)[: count - np.count_nonzero(above)]
    above[tied] = True
    scores[~above] = -np.inf
