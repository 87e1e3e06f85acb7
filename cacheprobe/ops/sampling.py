"""Chooses a token from logits: greedily, or at a temperature with noise keyed by (seed, position). Ties go to the
lowest id."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from cacheprobe.core.noise import gumbel_noise
from cacheprobe.core.records import SamplingParams
from cacheprobe.ops.processors import target_scores


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


def _as_numpy(values: Tensor) -> np.ndarray:
    """Returns the tensor as a NumPy array: float64 for a float64 tensor, otherwise float32."""
    values = values.detach()
    return (values if values.dtype == torch.float64 else values.float()).numpy()


def _require_a_best(logits: Tensor, position: int) -> None:
    best = logits.max()
    if not torch.isfinite(best):
        raise ValueError(f"logits for position {position} hold {'NaN' if torch.isnan(best) else float(best)}")
