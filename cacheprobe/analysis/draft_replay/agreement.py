"""Computes how likely a drafter and a verifier choose the same token, from the recorded top tokens of both."""

import numpy as np
from jaxtyping import Float, Int

from cacheprobe.core.noise import gumbel_noise


def tempered(logprobs_nats: Float[np.ndarray, "n k"], temperature: float) -> Float[np.ndarray, "n k"]:
    """Returns probabilities [n, k]: softmax of log-probabilities divided by the temperature, over the k tokens alone.

    This is the distribution of sampling with top_k = k.
    """
    scores = logprobs_nats.astype(np.float64) / temperature
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def prob_same_noise(
    draft_ids: Int[np.ndarray, "n k"],
    draft_probs: Float[np.ndarray, "n k"],
    target_ids: Int[np.ndarray, "n j"],
    target_probs: Float[np.ndarray, "n j"],
) -> Float[np.ndarray, "n"]:
    """Returns [n] the probability that both choose the same token, if the same Gumbel noise is added to the
    log-probabilities of both. Tokens that are not listed have probability 0.

    A token x is the choice of both with probability 1 / sum over tokens y of max(p(y) / p(x), q(y) / q(x)).
    Source: Daliri et al. 2024 (arXiv 2408.07978), the Gumbel coupling; acceptance="equality" of cacheprobe.
    Twin: tests.twins.measures_slowly.prob_same_noise_slowly, by drawing noise, within 4 standard errors.
    """
    is_same = draft_ids[:, :, None] == target_ids[:, None, :]
    draft_of_target = (is_same * draft_probs[:, :, None]).sum(1)  # [n, j]: q of the target's tokens
    is_draft_only = ~is_same.any(2)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        p_ratio = target_probs[:, :, None] / target_probs[:, None, :]  # [n, y, x] over the target's tokens
        q_ratio = draft_of_target[:, :, None] / draft_of_target[:, None, :]
        q_of_others = (is_draft_only * draft_probs).sum(1)[:, None] / draft_of_target
        sums = np.maximum(p_ratio, q_ratio).sum(1) + q_of_others
    is_in_both = (draft_of_target > 0) & (target_probs > 0)
    return np.where(is_in_both, 1 / np.where(is_in_both, sums, 1.0), 0.0).sum(1).clip(0.0, 1.0)


def prob_rejection(
    draft_ids: Int[np.ndarray, "n k"],
    draft_probs: Float[np.ndarray, "n k"],
    target_ids: Int[np.ndarray, "n j"],
    target_probs: Float[np.ndarray, "n j"],
) -> Float[np.ndarray, "n"]:
    """Returns [n] the probability that speculative sampling accepts a draft token: the sum over tokens of
    min(p(x), q(x)). Tokens that are not listed have probability 0.

    Source: Leviathan et al. 2023 (arXiv 2211.17192), theorem 3.5; acceptance="rejection" of cacheprobe.
    """
    is_same = draft_ids[:, :, None] == target_ids[:, None, :]
    smaller = np.minimum(draft_probs[:, :, None], target_probs[:, None, :])
    return (is_same * smaller).sum((1, 2)).clip(0.0, 1.0)


def keyed_choices(
    ids: Int[np.ndarray, "n k"],
    logprobs_nats: Float[np.ndarray, "n k"],
    temperature: float,
    seed: int,
    positions: Int[np.ndarray, "n"],
) -> Int[np.ndarray, "n"]:
    """Returns [n] the token that each distribution gives with the run's own noise at its position, of the listed tokens
    alone.

    positions: of the chosen tokens.  Twin: `ops.sampling.sample_token`, == if k is the whole vocabulary.
    """
    width = int(ids.max()) + 1
    chosen = []
    for own_ids, own_logprobs, position in zip(ids, logprobs_nats, positions.tolist(), strict=True):
        order = np.argsort(own_ids)  # ties go to the lowest id
        own_ids, own_logprobs = own_ids[order], own_logprobs[order].astype(np.float64)
        scores = own_logprobs / temperature + gumbel_noise(seed, position, width)[own_ids]
        chosen.append(int(own_ids[scores.argmax()]))
    return np.array(chosen, dtype=np.int64)
