"""Chooses tokens from logits, and judges a draft: how many of its tokens the verifier accepts."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.models.base import CachedLM
from cacheprobe.ops.acceptance import accept_or_recover, num_accepted
from cacheprobe.ops.kernel_set import KernelSet
from cacheprobe.ops.sampling import choose_token, sample_token, target_probs, two_largest


class Choice(NamedTuple):
    """Holds a chosen token id, its log-probability, and the margin between the log-probabilities of the two most likely
    tokens, in nats."""

    token_id: int
    logprob_nats: float
    """Log-probability of the token, in nats, under the model's own logits, before temperature and other processing."""
    margin_nats: float
    """Difference in nats between the log-probabilities of the two most likely tokens."""


def choose_next(
    state: SequenceState,
    logits: Float[Tensor, "v"],
    drafted: Sequence[int],
    position: int,
    likeliest: "Choice | None" = None,
    is_draft: bool = False,
) -> int:
    """Returns the token id that a request chooses for `position`, from logits [v] and its sampling settings.

    drafted: draft tokens after the committed ones. Tokens at or after `position` are ignored: while a preempted request
    is rebuilt, they are known already.
    likeliest: of these logits, if `likeliest_choices` read them already; a greedy request takes its token.
    is_draft: the token is a draft token. Any other of a request with forced tokens is the forced one.
    """
    if (forced := state.request.forced_token_ids) and not is_draft:
        return forced[position - state.request.num_prompt_tokens]
    sampling = state.sampling
    if likeliest is not None and sampling.is_plain and sampling.is_greedy:
        return likeliest.token_id
    if sampling.is_plain:
        assert sampling.temperature is not None and sampling.seed is not None
        return sample_token(logits, sampling.temperature, sampling.seed, position)
    return choose_token(logits, sampling, [*state.token_ids, *drafted][:position], position)


def likeliest_choices(model: CachedLM, logits: Float[Tensor, "n v"]) -> "Sequence[Choice | None]":
    """Returns the Choice of the most likely token, of equal ones the lowest id, for each row of logits [n, v], in one
    pass over the vocabulary; Nones if the model has no compiled loops.

    The bits of a row depend on that row alone. The logits must be finite numbers.
    Twin: `describe` of the first token id of the largest logit; ids and margins ==, log-probabilities close(1e-5).
    """
    operations = getattr(model, "operations", None)  # only some kinds of model have compiled loops
    if operations is None or isinstance(operations, KernelSet):  # its given logits are read by torch
        return [None] * len(logits)
    found = operations.readout.of_logits(logits, torch.full((len(logits),), -1), 2)
    largest = logits.gather(1, found.top_token_ids).double()
    margins = (largest[:, 0] - largest[:, 1]).tolist()
    ids, nats = found.top_token_ids[:, 0].tolist(), found.top_logprob_nats[:, 0].tolist()
    return [Choice(*parts) for parts in zip(ids, nats, margins, strict=True)]


def describe(token_id: int, logits: Float[Tensor, "v"], likeliest: Choice | None = None) -> Choice:
    """Returns the Choice of a token id under logits [v]: log-probability, and margin between the two likeliest tokens.

    Takes the logits of one position only, because the bits of a sum must not depend on the number of positions.
    likeliest: of these logits, if `likeliest_choices` read them already.
    """
    if likeliest is not None:
        if token_id == likeliest.token_id:
            return likeliest
        lower_by = float(logits[likeliest.token_id].double() - logits[token_id].double())
        return Choice(token_id, likeliest.logprob_nats - lower_by, likeliest.margin_nats)
    values = logits.float()
    largest, other = two_largest(values)
    logsumexp = (values - largest).exp_().sum().log() + largest
    return Choice(token_id, float(values[token_id] - logsumexp), largest - other)


class Judgement(NamedTuple):
    """Holds the number of accepted draft tokens, and the verifier's own token ids at the draft positions and at one
    more.

    If the last draft token ends the request, the verifier has no token after the draft.
    """

    target_token_ids: tuple[int, ...]
    num_accepted: int


def judge_by_equality(
    state: SequenceState, logits: Float[Tensor, "t v"], start: int, likeliest: Sequence[Choice | None]
) -> Judgement:
    """Accepts the draft tokens before the first that differs from the verifier's choice. Returns a Judgement.

    logits: [t, v]; logits[i] are for position start + i. The noise depends on seed and position alone, so the
    comparison works at any temperature.  likeliest: of each row of logits, see `choose_next`.
    """
    draft = state.draft
    rows = enumerate(zip(logits, likeliest, strict=True))
    targets = tuple(choose_next(state, row, draft[:t], start + t, best) for t, (row, best) in rows)
    return Judgement(targets, num_accepted(draft, targets))


def judge_by_rejection(
    state: SequenceState, logits: Float[Tensor, "t v"], start: int, likeliest: Sequence[Choice | None]
) -> Judgement:
    """Accepts each draft token with probability min(1, p / q), up to the first rejected one. Returns a Judgement.

    p, q: the token's probability under the model and under the drafter; q is 1 for a token that the engine did not
    draw. A greedy request is judged by equality. logits, likeliest: as for `judge_by_equality`.

    Source: Leviathan et al. 2023 (arXiv 2211.17192), algorithm 1.
    """
    draft, sampling = state.draft, state.sampling
    assert sampling.seed is not None
    if sampling.is_greedy:
        return judge_by_equality(state, logits, start, likeliest)
    targets: list[int] = []
    count = 0  # of accepted draft tokens
    for t, row in enumerate(logits):
        position = start + t
        if t < len(draft) and count == t:
            prefix = [*state.token_ids, *draft[:t]]
            drawn_id, probs = state.draft_probs.get(position, (-1, None))
            is_accepted, token_id = accept_or_recover(
                target_probs(row, sampling, prefix),
                probs if drawn_id == draft[t] else None,
                draft[t],
                sampling.seed,
                position,
            )
            count += is_accepted
        else:
            token_id = choose_next(state, row, draft[:t], position, likeliest[t])
        targets.append(token_id)
    return Judgement(tuple(targets), count)


JUDGES = {"equality": judge_by_equality, "rejection": judge_by_rejection}
"""Maps each value of EngineConfig.acceptance to the function that judges a draft."""
