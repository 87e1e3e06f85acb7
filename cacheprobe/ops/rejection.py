"""Implements the accept rule of speculative sampling: a draft token is kept with a probability such that output follows
the target distribution exactly.

The rule in `ops.acceptance` uses no chance: noise is keyed, so tokens can be compared exactly at any temperature. The
rule here accepts more tokens of a drafter that samples by itself.
"""

import numpy as np
from jaxtyping import Float64
from torch import Tensor

from cacheprobe.core.noise import ACCEPT_STREAM, RECOVER_STREAM, uniform_noise


def acceptance_prob(target_prob: float, draft_prob: float) -> float:
    """Returns the probability min(1, p / q) of accepting a draft token that has probability p under the target and q
    under the draft distribution.

    Raises: ValueError for a draft token with probability 0 under the draft distribution.
    """
    if draft_prob <= 0:
        raise ValueError(f"a candidate has probability {draft_prob} under the distribution it was drawn from")
    return 1.0 if target_prob >= draft_prob else target_prob / draft_prob


def recovery_probs(
    target_probs: Float64[Tensor, "v"], draft_probs: Float64[Tensor, "v"] | None, draft_token_id: int
) -> Float64[Tensor, "v"] | None:
    """Returns the distribution [v] of the token that replaces a rejected draft token: max(target - draft, 0),
    normalised. draft_probs None: the draft gives `draft_token_id` the probability 1.

    Returns None if the target nowhere exceeds the draft.
    """
    if draft_probs is None:
        excess = target_probs.clone()
        excess[draft_token_id] = 0.0
    else:
        excess = (target_probs - draft_probs).clamp(min=0.0)
    total = float(excess.cpu().numpy().sum())  # NumPy's sums do not depend on the number of threads
    return excess / total if total > 0 else None


def accept_or_recover(
    target_probs: Float64[Tensor, "v"],
    draft_probs: Float64[Tensor, "v"] | None,
    draft_token_id: int,
    seed: int,
    position: int,
) -> tuple[bool, int]:
    """Returns (whether the draft token for absolute position `position` is kept, the token id that is then at that
    position).

    target_probs: [v] distribution that the output must follow.  draft_probs: [v] distribution from which the draft
    token was sampled, given the same tokens before it; None if it was not sampled, so that q is 1.
    The random numbers are keyed by (seed, position) in their own streams: independent of the draft token, of the tokens
    around it, and of each other. Whether a position has a draft token must not depend on which token was sampled for
    it.
    Source: Leviathan et al. 2023 (arXiv 2211.17192), algorithm 1; Chen et al. 2023 (2302.01318), theorem 1.
    Twin: tests.twins.equivalence.accept_or_recover_slowly, ==.
    """
    draft_prob = 1.0 if draft_probs is None else float(draft_probs[draft_token_id])
    accept = acceptance_prob(float(target_probs[draft_token_id]), draft_prob)
    if uniform_noise(seed, position, 1, ACCEPT_STREAM)[0] < accept:
        return True, draft_token_id
    recovery = recovery_probs(target_probs, draft_probs, draft_token_id)
    if recovery is None:
        return True, draft_token_id
    cumulative = np.cumsum(recovery.cpu().numpy())
    # scaled by the last sum, which rounding may leave below 1 and even below the random number
    unit = cumulative[-1] * uniform_noise(seed, position, 1, RECOVER_STREAM)[0]
    return False, int(
        np.searchsorted(cumulative, unit)
    )  # the first sum that reaches it: never a token of probability 0
