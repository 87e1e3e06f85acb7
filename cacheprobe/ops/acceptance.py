"""Finds how many draft tokens a verifier accepts, by equality or by the rule of speculative sampling, and at which
generated token a request ends.

Equality uses no chance: noise is keyed, so tokens can be compared exactly at any temperature. The rule of speculative
sampling keeps a draft token with a probability such that output follows the target distribution exactly; it accepts
more tokens of a drafter that samples by itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64
from torch import Tensor

from cacheprobe.core.noise import ACCEPT_STREAM, RECOVER_STREAM, uniform_noise
from cacheprobe.core.tokens.text import TextWindow


def num_accepted(draft_token_ids: Sequence[int], target_token_ids: Sequence[int]) -> int:
    """Returns the length of the longest prefix of the draft that equals the verifier's own tokens.

    Source: LLM-42 (arXiv 2601.17768), section 4.2.  Twin: tests.twins.equivalence.num_accepted_slowly, ==.
    """
    n = 0
    while n < len(draft_token_ids) and draft_token_ids[n] == target_token_ids[n]:
        n += 1
    return n


@dataclass(frozen=True)
class StopRule:
    """Holds the stop tokens and stop texts of a request; its answers do not depend on earlier calls."""

    token_ids: frozenset[int]
    texts: tuple[str, ...]
    decode: Callable[[Sequence[int]], str]

    @cached_property
    def _window(self) -> TextWindow:
        """Window that holds more text than the longest stop text, before the newest token."""
        most_bytes = max(len(text.encode()) for text in self.texts)
        return TextWindow(self.decode, num_chars=max(map(len, self.texts)), num_tokens=most_bytes)

    def ends(self, generated: Sequence[int], newer: Sequence[int] = ()) -> bool:
        """Returns whether the tokens `generated` and then `newer`, together at least one, end the request: the last one
        is a stop token, or the text of all contains a stop text, and that of all but the last does not.

        A stop text may span tokens and windows. Decodes the newest tokens alone, as many as the longest stop text needs
        and at least 64.
        Twin: tests.twins.equivalence.ends_slowly, ==.
        """
        newest = newer or generated[-1:]
        if newest[-1] in self.token_ids:
            return True
        if not self.texts:
            return False
        before = generated if newer else generated[:-1]
        said = self.decode([*before[self._window.start(before) :], *newest])
        return any(text in said for text in self.texts)


class Ending(NamedTuple):
    """Holds the number of new tokens that a request keeps, and why it ends after them: stop, length, or None."""

    num_kept: int
    finish: str | None


def find_ending(generated: Sequence[int], token_ids: Sequence[int], rule: StopRule, num_left: int) -> Ending:
    """Returns the Ending for the new tokens `token_ids`, which follow `generated`: tokens after the first stop, and
    tokens beyond the `num_left` still allowed, are not kept."""
    for index in range(min(len(token_ids), num_left)):
        if rule.ends(generated, token_ids[: index + 1]):
            return Ending(index + 1, "stop")
    return Ending(num_left, "length") if len(token_ids) >= num_left else Ending(len(token_ids), None)


def clip_draft(generated: Sequence[int], token_ids: Sequence[int], rule: StopRule, limit: int) -> tuple[int, ...]:
    """Returns the first of the draft tokens, as a tuple: at most `limit`, and none after a token that ends the request.
    Later ones could not be committed.

    generated: the request's earlier tokens, committed and then drafted, without the prompt.
    """
    clipped = tuple(token_ids)[: max(limit, 0)]
    num_left = len(clipped) + 1  # more than there are, so that only a stop cuts them
    return clipped[: find_ending(generated, clipped, rule, num_left).num_kept]


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
