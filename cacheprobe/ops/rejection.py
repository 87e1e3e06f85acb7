"""Speculative sampling's accept rule: a candidate stays by chance, so that what stays follows the target exactly.

The rule in `ops.acceptance` needs no chance: noise is keyed, and equality of tokens is exact at any temperature. This
one accepts more of what a drafter samples on its own.
"""

import numpy as np
from jaxtyping import Float64
from torch import Tensor

from cacheprobe.core.noise import ACCEPT_STREAM, RECOVER_STREAM, uniform_noise


def acceptance_prob(target_prob: float, draft_prob: float) -> float:
    """Probability with which a candidate stays, from its own under target and draft: min(1, p / q).

    Raises: ValueError for a candidate that the draft distribution excludes.
    """
    if draft_prob <= 0:
        raise ValueError(f"a candidate has probability {draft_prob} under the distribution it was drawn from")
    return 1.0 if target_prob >= draft_prob else target_prob / draft_prob


def recovery_probs(
    target_probs: Float64[Tensor, "v"], draft_probs: Float64[Tensor, "v"] | None, draft_token_id: int
) -> Float64[Tensor, "v"] | None:
    """[v] distribution of the token that replaces a rejected candidate: what target exceeds draft by, normalised.

    None where target nowhere exceeds draft: the two are equal but for rounding, and nothing is to be rejected.
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
    """Whether the candidate for absolute position `position` stays, and the token that stands there then.

    target_probs: [v] what the position is to follow.  draft_probs: [v] what the candidate was drawn from, given the
    same tokens before it; None where it was not drawn, and q is 1.
    Chances are keyed by (seed, position) on streams of their own: independent of the candidate, of the tokens around
    it, and of each other. Whether a position has a candidate must not depend on which one was drawn for it.
    Source: Leviathan et al. 2023 (arXiv 2211.17192), algorithm 1; Chen et al. 2023 (2302.01318), theorem 1.
    Twin: tests.equivalence.accept_or_recover_slowly, ==.
    """
    draft_prob = 1.0 if draft_probs is None else float(draft_probs[draft_token_id])
    accept = acceptance_prob(float(target_probs[draft_token_id]), draft_prob)
    if uniform_noise(seed, position, 1, ACCEPT_STREAM)[0] < accept:
        return True, draft_token_id
    recovery = recovery_probs(target_probs, draft_probs, draft_token_id)
    if recovery is None:
        return True, draft_token_id
    reached = np.cumsum(recovery.cpu().numpy())
    # of the last sum, which rounding may leave below 1 and even below the chance
    unit = reached[-1] * uniform_noise(seed, position, 1, RECOVER_STREAM)[0]
    return False, int(np.searchsorted(reached, unit))  # the first that reaches it: never a token of probability 0
