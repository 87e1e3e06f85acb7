"""Chooses a token from logits, records how probable it was, and judges drafts."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.ops.acceptance import num_accepted
from cacheprobe.ops.processors import target_probs
from cacheprobe.ops.rejection import accept_or_recover
from cacheprobe.ops.sampling import choose_token, sample_token, two_largest


class Choice(NamedTuple):
    """Holds a chosen token with its log-probability and rank."""

    token_id: int
    logprob_nats: float
    """Of the token under the model's own logits, before any processor."""
    margin_nats: float
    """Between the two best tokens: how settled the choice was."""


def choose_next(state: SequenceState, logits: Float[Tensor, "v"], drafted: Sequence[int], position: int) -> int:
    """Returns the token that the request chooses: a function of the logits, its settings and the tokens before
    `position`.

    Of a request whose rows are rebuilt, later tokens are known already, and may not matter.
    """
    sampling = state.sampling
    if sampling.is_plain:
        assert sampling.temperature is not None and sampling.seed is not None
        return sample_token(logits, sampling.temperature, sampling.seed, position)
    return choose_token(logits, sampling, [*state.token_ids, *drafted][:position], position)


def describe(token_id: int, logits: Float[Tensor, "v"]) -> Choice:
    """Returns the Choice of one token: log-probability and top-two margin. Computes one row at a time, because the bits
    of the sum must not depend on the number of rows."""
    values = logits.float()
    largest, other = two_largest(values)
    logsumexp = (values - largest).exp_().sum().log() + largest
    return Choice(token_id, float(values[token_id] - logsumexp), largest - other)


class Judgement(NamedTuple):
    """Holds the verifier's own tokens at each draft position and one beyond, and the number of accepted candidates."""

    target_token_ids: tuple[int, ...]
    num_accepted: int


def judge_by_equality(state: SequenceState, logits: Float[Tensor, "t v"], start: int) -> Judgement:
    """Accepts candidates up to the first that differs from the verifier's choice. Noise is keyed by position, so this
    works at any temperature."""
    draft = state.draft
    targets = tuple(choose_next(state, row, draft[:t], start + t) for t, row in enumerate(logits))
    return Judgement(targets, num_accepted(draft, targets))


def judge_by_rejection(state: SequenceState, logits: Float[Tensor, "t v"], start: int) -> Judgement:
    """Accepts candidates by speculative sampling: each with probability min(1, p / q).

    Source: Leviathan et al. 2023 (arXiv 2211.17192), algorithm 1.
    """
    draft, sampling = state.draft, state.sampling
    assert sampling.seed is not None
    if sampling.is_greedy:
        return judge_by_equality(state, logits, start)
    targets: list[int] = []
    n = 0
    for t, row in enumerate(logits):
        position = start + t
        if t < len(draft) and n == t:
            prefix = [*state.token_ids, *draft[:t]]
            candidate, probs = state.draft_probs.get(position, (-1, None))
            is_accepted, token_id = accept_or_recover(
                target_probs(row, sampling, prefix),
                probs if candidate == draft[t] else None,
                draft[t],
                sampling.seed,
                position,
            )
            n += is_accepted
        else:
            token_id = choose_next(state, row, draft[:t], position)
        targets.append(token_id)
    return Judgement(tuple(targets), n)


JUDGES = {"equality": judge_by_equality, "rejection": judge_by_rejection}
