"""Chooses a token from logits: greedily, or at a temperature with noise keyed by (seed, position), after repetition
penalty, top_k, top_p and min_p. Ties go to the lowest id.

Log-weights are computed in float64 by NumPy, because NumPy's sums, unlike torch's, do not depend on the number of
threads.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from cacheprobe.core.noise import gumbel_noise
from cacheprobe.core.records import SamplingParams


class Choice(NamedTuple):
    """Holds a chosen token id, its log-probability, and the margin between the log-probabilities of the two most likely
    tokens, in nats."""

    token_id: int
    logprob_nats: float
    """Log-probability of the token, in nats, under the model's own logits, before temperature and other processing."""
    margin_nats: float
    """Difference in nats between the log-probabilities of the two most likely tokens."""


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
    _require_best_score(scores)
    if sampling.repetition_penalty not in (None, 1) and len(prefix):
        _penalise(scores, sampling.repetition_penalty, np.asarray(prefix))
    if not sampling.is_greedy:
        scores /= sampling.temperature
        _require_best_score(scores)
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


def _require_best_score(scores: np.ndarray) -> None:
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


def lowest_argmax(logits: Float[Tensor, "v"]) -> int:
    """Returns the index of the largest of logits [v]; the lowest index among equal ones."""
    if logits.device.type == "cpu":
        return int(_as_numpy(logits).argmax())  # NumPy promises the first one, torch does not
    return int((logits == logits.max()).nonzero()[0, 0])


def sample_token(logits: Float[Tensor, "v"], temperature: float, seed: int, position: int) -> int:
    """Returns the token id chosen from logits [v] for absolute position `position`: greedy at temperature 0, else a
    sample.

    logits: [v] in the model's own dtype.
    At temperature 0, the lowest id of the largest logit; else a sample from softmax(logits / temperature) by the
    Gumbel-max trick with noise keyed by (seed, position).
    Raises: ValueError on NaN or +infinity, or if no logit is finite.
    Source: Gumbel 1954; LLM-42 (arXiv 2601.17768) uses the same rule so that acceptance is equality of tokens.
    Twin: tests.twins.equivalence.sample_token_slowly, ==.
    """
    _require_a_best(logits, position)
    if temperature == 0:
        return lowest_argmax(logits)
    noise = torch.from_numpy(gumbel_noise(seed, position, logits.shape[-1]))
    return lowest_argmax(logits.double().cpu() / temperature + noise)


def choose_token(logits: Float[Tensor, "v"], sampling: SamplingParams, prefix: Sequence[int], position: int) -> int:
    """Returns the token id chosen from logits [v] for absolute position `position`, under all sampling settings of a
    request.

    logits: [v] in the model's own dtype.  prefix: the tokens at positions 0 to position - 1.
    The noise is that of `sample_token`, independent of the filters.
    Raises: ValueError on NaN or +infinity, or if no logit is finite.
    Twin: tests.twins.equivalence.choose_token_slowly, ==.
    """
    temperature = sampling.temperature or 0.0
    if sampling.is_plain:
        return sample_token(logits, temperature, sampling.seed or 0, position)
    _require_a_best(logits, position)
    scores = target_scores(logits, sampling, prefix)
    if temperature > 0:
        scores += torch.from_numpy(gumbel_noise(sampling.seed or 0, position, len(scores)))
    return lowest_argmax(scores)


def two_largest(values: Float[Tensor, "v"]) -> tuple[float, float]:
    """Returns the largest and the second largest of values [v], as floats; they may be equal. v must be at least 2.

    Twin: torch.topk, ==.
    """
    if values.device.type != "cpu":
        best = values.topk(2).values
        return float(best[0]), float(best[1])
    array = _as_numpy(values)
    first = int(array.argmax())
    maxima_around = [part.max() for part in (array[:first], array[first + 1 :]) if len(part)]
    return float(array[first]), float(max(maxima_around))


_ROWS_AT_ONCE = 64
"""Rows of logits that `top_two` reads at once: its numbers take six times the memory of bfloat16 logits."""
_UNIT_BITS = 42
"""Sums of probabilities are counted in units of 2^-42: of up to 2^20 tokens, each at most 1, they fit 64 bits."""


def top_two(logits: Float[Tensor, "n v"]) -> Float64[Tensor, "n 4"]:
    """Returns for each row of logits: the lowest id of the largest one, its log-probability in nats, how many nats the
    second one is below it, and the largest one itself. If that is NaN or infinite, the others mean nothing.

    For a GPU, which adds numbers in an order that depends on the number of rows. Whole numbers are added here, so that
    the bits of a row depend on that row alone.
    Twin: `describe` of the row on the CPU: ids and margins ==, log-probabilities close(1e-5).
    """
    first, *others = [_top_two(rows) for rows in logits.split(_ROWS_AT_ONCE)]
    return torch.cat([first, *others]) if others else first


def _top_two(logits: Tensor) -> Tensor:
    ids = torch.arange(logits.shape[-1], device=logits.device, dtype=torch.int32)
    values = logits if logits.dtype == torch.float64 else logits.float()
    largest = values.amax(-1, keepdim=True)
    first = torch.where(values == largest, ids, len(ids)).amin(-1, keepdim=True)
    second = values.masked_fill(ids == first, -torch.inf).amax(-1)
    units = (values - largest).exp_().mul_(2.0**_UNIT_BITS).long().sum(-1)
    best = largest[:, 0].double()
    nats = _UNIT_BITS * math.log(2) - units.double().log()
    return torch.stack((first[:, 0].double(), nats, best - second, best), -1)


def choices_in(best: Float64[Tensor, "n 4"]) -> list[Choice]:
    """Returns the Choice of each row of what `top_two` returned, with a log-probability of NaN if the largest logit is
    NaN or infinite. best: on the CPU."""
    return [
        Choice(int(token_id), nats if math.isfinite(largest) else math.nan, margin)
        for token_id, nats, margin, largest in best.tolist()
    ]


def describe(token_id: int, logits: Float[Tensor, "v"], top_choice: Choice | None = None) -> Choice:
    """Returns the Choice of a token id under logits [v]: log-probability, and margin between the two top_choice tokens.

    Takes the logits of one position only, because the bits of a sum must not depend on the number of positions.
    top_choice: of these logits, if `top_choices` read them already.
    """
    if top_choice is not None:
        if token_id == top_choice.token_id:
            return top_choice
        lower_by = float(logits[top_choice.token_id].double() - logits[token_id].double())
        return Choice(token_id, top_choice.logprob_nats - lower_by, top_choice.margin_nats)
    values = logits.float()
    largest, other = two_largest(values)
    logsumexp = (values - largest).exp_().sum().log() + largest
    return Choice(token_id, float(values[token_id] - logsumexp), largest - other)


def _as_numpy(values: Tensor) -> np.ndarray:
    """Returns the tensor as a NumPy array: float64 for a float64 tensor, otherwise float32."""
    values = values.detach()
    return (values if values.dtype == torch.float64 else values.float()).numpy()


def _require_a_best(logits: Tensor, position: int) -> None:
    best = logits.max()
    if not torch.isfinite(best):
        raise ValueError(f"logits for position {position} hold {'NaN' if torch.isnan(best) else float(best)}")
