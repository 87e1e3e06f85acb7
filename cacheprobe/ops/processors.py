"""Computes the log-weights that a request samples from: repetition penalty, temperature, top_k, top_p, min_p.

Gumbel noise is added in `ops.sampling`. All steps use float64 and NumPy, because NumPy's sums, unlike torch's, do not
depend on the number of threads.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from cacheprobe.core.records import SamplingParams


def target_scores(logits: Float[Tensor, "v"], sampling: SamplingParams, prefix: Sequence[int]) -> Float64[Tensor, "v"]:
    """Returns log-weights [v], up to a constant, of the distribution from which a request samples its next token.

    logits: [v] in the model's own dtype.  prefix: prompt and output before this position, used by the penalty only.
    The result is on the CPU, with -inf for every excluded token. Order and definitions follow Hugging Face, except that
    equal scores rank by the lower id: top_k keeps exactly k tokens, and top_p keeps a uniquely defined set. At
    temperature 0 only the penalty applies, as in Hugging Face.
    Raises: ValueError on NaN or +infinity, or if every logit is -infinity.
    Source: repetition penalty, Keskar et al. 2019 (arXiv 1909.05858), section 4.1; top_k, Fan et al. 2018 (1805.04833),
    section 5.4; top_p, Holtzman et al. 2019 (1904.09751), section 3.1; min_p, Nguyen et al. 2024 (2407.01082).
    Twin: tests.twins.equivalence.target_scores_slowly: the same tokens, scores ==; without ties transformers' own
    processors.
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
    """Returns the probabilities [v] from which a request samples its next token: the softmax of `target_scores`. At
    temperature 0, probability 1 for the best token (the lowest id of equal ones). Raises: ValueError as
    `target_scores`."""
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
    """Divides the positive scores of tokens `token_ids` by `penalty` and multiplies the negative ones, in place."""
    seen = scores[token_ids]
    scores[token_ids] = np.where(seen < 0, seen * penalty, seen / penalty)


def _filter(scores: np.ndarray, sampling: SamplingParams) -> None:
    """Sets the scores that top_k, top_p and min_p remove to -inf, in place."""
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
    """Sets all but the `count` best scores to -inf, in place; of scores equal to `threshold`, the lowest ids stay."""
    above = scores > threshold
    tied = np.flatnonzero(scores == threshold)[: count - np.count_nonzero(above)]
    above[tied] = True
    scores[~above] = -np.inf
