"""Choosing a token from logits: greedy, or at a temperature with keyed noise. Ties go to the lowest id."""

import torch
from jaxtyping import Float
from torch import Tensor

from cacheprobe.noise import gumbel_noise


def lowest_argmax(logits: Float[Tensor, "v"]) -> int:
    """Id of the largest logit; the lowest one of those that are equal."""
    return int((logits == logits.max()).nonzero()[0, 0])


def sample_token(logits: Float[Tensor, "v"], temperature: float, seed: int, position: int) -> int:
    """The token for absolute position `position`.

    logits: [v] in the model's own dtype.  position: where the chosen token will stand.
    At temperature 0 the lowest id of the largest logit, else a draw from softmax(logits / temperature) by the
    Gumbel-max trick with noise keyed by (seed, position).
    Raises: ValueError on NaN, or where no logit is finite.
    Source: Gumbel 1954; LLM-42 (arXiv 2601.17768) uses the same rule so that acceptance is equality of tokens.
    Twin: tests.equivalence.sample_token_slowly, ==.
    """
    best = logits.max()
    if not torch.isfinite(best):
        raise ValueError(f"logits for position {position} hold {'NaN' if torch.isnan(best) else float(best)}")
    if temperature == 0:
        return lowest_argmax(logits)
    noise = torch.from_numpy(gumbel_noise(seed, position, logits.shape[-1]))
    return lowest_argmax(logits.double().cpu() / temperature + noise)


def top_two_margin_nats(logits: Float[Tensor, "v"]) -> float:
    """Difference between the two best logits, in nats: how settled the choice was."""
    best = logits.float().topk(2).values
    return float(best[0] - best[1])
