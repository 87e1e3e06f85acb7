"""Replays the verify passes of one request over its committed text, with the drafts of another drafter."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from operator import mul
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from cacheprobe.core.live import LiveTokenizer
from cacheprobe.core.noise import gumbel_noise
from cacheprobe.core.records import Request, RowSlot, SamplingParams
from cacheprobe.core.values import whole_number
from cacheprobe.engine.drafters.base import DraftContext, Drafter
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.models.base import CachedLM
from cacheprobe.models.heads.lm import DraftHeadLM
from cacheprobe.ops.acceptance import clip_draft, num_accepted
from cacheprobe.ops.sampling import choose_token

if TYPE_CHECKING:
    from cacheprobe.trace.trace import Trace


@dataclass(frozen=True)
class CommittedText:
    """Holds what a replay needs of one request: its committed tokens and its settings."""

    request: Request
    token_ids: tuple[int, ...]
    """Prompt and generated tokens."""
    is_stopped: bool
    """Whether a stop token or a stop text ended the request. If not, its number of tokens was its maximum."""

    @property
    def request_id(self) -> int:
        """The request's number in the run."""
        return int(self.request.request_id)

    @property
    def first(self) -> int:
        """Position of the first generated token, which the prefill commits."""
        return self.request.num_prompt_tokens

    @property
    def last(self) -> int:
        """Position of the newest generated token."""
        return len(self.token_ids) - 1

    @property
    def sampling(self) -> SamplingParams:
        """The request's settings. max_new_tokens is the number of its tokens if no stop ended it."""
        settings = self.request.sampling or SamplingParams()
        return settings if self.is_stopped else replace(settings, max_new_tokens=len(self.token_ids) - self.first)

    def num_left(self, position: int) -> int:
        """Returns how many tokens may be committed after the one at `position`."""
        return (self.sampling.max_new_tokens or 1) - (position - self.first + 1)


class Draft(NamedTuple):
    """Holds what is known of one draft, place by place."""

    has_token: tuple[float, ...]
    """Probability that the draft has a token at this place."""
    agrees: tuple[float, ...]
    """Probability that the token at this place is accepted if all before it were. A place after the last is 0."""


class ReplayedPass(NamedTuple):
    """Holds one verify pass of a replay."""

    position: int
    """Position of the newest committed token, which the pass reads first."""
    weight: float
    """Probability that a pass begins at this position: 1 in an exact replay."""
    drafted: tuple[float, ...]
    """Probability that the draft has a token, by place."""
    accepted: tuple[float, ...]
    """Probability that the token and all tokens before it are accepted, by place."""


def replay_passes(
    text: CommittedText, source: "RecordedExit | TokenDrafts", window: int, draft_length: int | None = None
) -> list[ReplayedPass]:
    """Returns the verify passes, by position, in which the committed text would be written again with another drafter.

    window: tokens of one pass.  draft_length: as the number of `cp.run`; None for all that the window takes. The
    adaptive length is not replayed: it depends on costs, and on the run's other requests.
    The limits of a draft, and the token that the verifier adds, are those of the engine's loop. If a probability is
    neither 0 nor 1, every possible sequence of passes counts with its probability.
    Twin: tests.twins.measures_slowly.expected_passes_slowly, close(1e-9).
    """
    weights = {text.first: 1.0}
    passes = []
    for position in range(text.first, text.last):
        if not (weight := weights.pop(position, 0.0)):
            continue
        limit = min(window - 1, text.num_left(position) - 1, window if draft_length is None else draft_length)
        draft = source.draft(position, limit) if limit > 0 else Draft((), ())
        survival = tuple(accumulate(draft.agrees, mul))
        passes.append(ReplayedPass(position, weight, draft.has_token, survival))
        for accepted, (at_least, more) in enumerate(pairwise((1.0, *survival, 0.0))):
            after = min(position + accepted + 1, text.last)
            weights[after] = weights.get(after, 0.0) + weight * (at_least - more)  # exactly this number accepted
    return passes


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


NO_TOKEN = -1
"""Stands for a draft token of an estimate, which is a distribution and no token."""


@dataclass(frozen=True)
class Sampled:
    """Says how draft tokens are chosen and accepted in a replay."""

    temperature: float
    is_own: bool
    """Whether this is the temperature of the run, whose committed tokens and noise are then those of the replay."""
    acceptance: str
    """equality or rejection."""


class RecordedExit:
    """Gives the drafts of an early exit at one layer, from the readings of the committed rows at this layer."""

    def __init__(self, text: CommittedText, tokens: Int[np.ndarray, "n"], agrees: Float[np.ndarray, "n"]) -> None:
        """Takes one entry for each row from that of the first generated token to the last but one.

        tokens: the token that the row would draft, NO_TOKEN if unknown.  agrees: the probability that it is accepted.
        """
        self._text, self._tokens, self._agrees = text, tokens, agrees
        self._stops = frozenset(cast("tuple[int, ...]", text.sampling.stop_token_ids or ()))

    def draft(self, position: int, limit: int) -> Draft:
        """Returns the Draft after the committed token at `position`, at most `limit` places, as probabilities. Places
        with a recorded row have a token. Later places have one only if an earlier token was wrong: if all were right,
        the text ended there. A stop token that is surely wrong ends the draft."""
        start = position - self._text.first
        agrees = self._agrees[start : start + limit]
        surviving = float(agrees.prod())
        has_token = [1.0] * len(agrees) + [1.0 - surviving] * (limit - len(agrees))
        if not agrees.all():
            wrong = int((agrees == 0).argmax()) if (agrees == 0).any() else limit
            if wrong < len(agrees) and int(self._tokens[start + wrong]) in self._stops:
                has_token[wrong + 1 :] = [0.0] * (limit - wrong - 1)
        return Draft(tuple(has_token), tuple(agrees.tolist()))


def exit_of(text: CommittedText, readings: pd.DataFrame, layer: int, last_layer: int, sampled: Sampled) -> RecordedExit:
    """Returns the RecordedExit of one request and layer.

    readings: the request's readings of committed rows, of all layers.
    Raises: ValueError if a reading is missing, with what to capture.
    """
    positions = np.arange(text.first, text.last)
    committed = np.array(text.token_ids[text.first + 1 :], dtype=np.int64)
    ids, logprobs = _top_of(text, readings, layer, positions)
    if sampled.is_own and (not sampled.temperature or sampled.acceptance == "equality"):
        tokens = ids[:, 0]
        if sampled.temperature and len(positions):
            seed = text.sampling.seed or 0
            tokens = keyed_choices(ids, logprobs, sampled.temperature, seed, positions + 1)
        return RecordedExit(text, tokens, (tokens == committed).astype(np.float64))
    target_ids, target_logprobs = _top_of(text, readings, last_layer, positions)
    if not sampled.temperature:
        return RecordedExit(text, ids[:, 0], (ids[:, 0] == target_ids[:, 0]).astype(np.float64))
    prob = prob_rejection if sampled.acceptance == "rejection" else prob_same_noise
    probs, target_probs = (tempered(one, sampled.temperature) for one in (logprobs, target_logprobs))
    return RecordedExit(text, np.full(len(ids), NO_TOKEN), prob(ids, probs, target_ids, target_probs))


def _top_of(
    text: CommittedText, readings: pd.DataFrame, layer: int, positions: Int[np.ndarray, "n"]
) -> tuple[Int[np.ndarray, "n k"], Float[np.ndarray, "n k"]]:
    """Returns (token ids, log-probabilities in nats) of the top tokens at one layer, likeliest first, by position."""
    own = readings[readings.layer == layer].set_index("position")
    if lacking := sorted(set(positions.tolist()) - set(own.index)):
        raise ValueError(
            f"request {text.request_id} has no lens reading at position {lacking[0]} of layer {layer}, expected one at "
            f"each position from {text.first} to {text.last - 1}; run with capture='Z' and without filters by layer, "
            "position, phase or status"
        )
    own = own.loc[positions]
    if own.empty:
        return np.zeros((0, 1), dtype=np.int64), np.zeros((0, 1))
    return np.stack(own.top_token_ids.to_list()).astype(np.int64), np.stack(own.top_logprob_nats.to_list())


class TokenContext:
    """Is the DraftContext of a replay, and its model: it chooses tokens, and refuses to run the verified model."""

    def __init__(self, drafter_name: str, d_vocab: int | None, tokenizer: LiveTokenizer = None) -> None:
        """d_vocab: size of the model's vocabulary; None if the run does not say."""
        self.d_vocab, self.tokenizer, self.model = d_vocab, tokenizer, self
        self._refusal = ValueError(
            f"drafter {drafter_name} runs the verified model, which a replay does not; EarlyExit is read from the "
            "lens readings, other drafters must need only tokens; try this one with cp.run(model, prompts, drafter=...)"
        )

    def __getattr__(self, name: str) -> object:
        raise self._refusal

    def feed_newest(self, states: Sequence[SequenceState], num_layers: int | None = None) -> Tensor:
        """Raises: ValueError, because a replay does not run the verified model."""
        raise self._refusal

    def choose(
        self, states: Sequence[SequenceState], logits: Tensor, drafted: Sequence[Sequence[int]] | None = None
    ) -> list[int]:
        """Returns the token id that each request would choose from its row of logits [b, v], with its own settings and
        noise."""
        before = [()] * len(states) if drafted is None else drafted
        texts = [[*state.token_ids, *state.draft, *own] for state, own in zip(states, before, strict=True)]
        read = zip(states, logits, texts, strict=True)
        return [choose_token(row, state.sampling, text, len(text)) for state, row, text in read]


class HeadContext(TokenContext):
    """Is the DraftContext of a replay of a drafter with a head, which reads the states of a trace."""

    def __init__(self, drafter_name: str, trace: "Trace", model: CachedLM, head: DraftHeadLM) -> None:
        super().__init__(drafter_name, model.d_vocab, model.tokenizer)
        self.model, self._trace, self._sites = model, trace, head.target_sites
        self._kept: tuple[int, list[Tensor]] = -1, []

    def target_states(self, state: SequenceState, start: int, end: int) -> Tensor:
        """Returns the recorded states [p, l, m] of a request's committed text. Raises: ValueError if the run did not
        keep them."""
        if self._kept[0] != state.request_id:
            if any(site != "S" for site, _ in self._sites):
                raise ValueError("the head reads the embedding, which a trace does not keep; draft with it in cp.run")
            kept = [self._trace.states(site, layer, state.request_id) for site, layer in self._sites]
            self._kept = state.request_id, kept
        return torch.stack([states[start:end] for states in self._kept[1]], dim=1)

    def recording(self, rows: Sequence[RowSlot], shape: tuple[int, int]) -> AbstractContextManager[None]:
        """Returns a context manager that does nothing: a replay is not recorded."""
        return nullcontext()


class TokenDrafts:
    """Gives the drafts of a drafter for one request. Call `close` at the end."""

    def __init__(self, text: CommittedText, drafter: Drafter, draft_length: int | None, context: TokenContext) -> None:
        """Begins with the prompt and the first generated token committed."""
        self._text, self._drafter = text, drafter
        self._has_cap = draft_length is not None
        self._context = cast("DraftContext", context)
        # stop texts need a tokenizer; they end the committed text, so that a right draft ends there too
        stops = text.sampling.stop_token_ids or ()  # none are known of an import
        self._state = SequenceState(text.request, True, replace(text.sampling, stop=(), stop_token_ids=stops))

    def draft(self, position: int, limit: int) -> Draft:
        """Returns the draft of at most `limit` tokens after the committed token at `position`, from as many calls of
        `extend` as the engine makes."""
        state, text = self._state, self._text
        if missing := text.token_ids[len(state.token_ids) : position + 1]:
            state.commit(missing)
        state.drop_draft()
        state.draft_cap = limit if self._has_cap else None
        rest = list(text.token_ids[position + 1 :])
        while len(state.draft) < limit and not state.draft_ends() and not (text.is_stopped and state.draft == rest):
            (proposed,) = self._drafter.extend(self._context, [state])
            listed = [whole_number("a proposed token", token) for token in proposed]
            kept = clip_draft([*state.generated, *state.draft], listed, state.stop_rule, limit - len(state.draft))
            if not kept:
                break
            state.draft.extend(kept)
            if text.is_stopped and state.draft[: len(rest)] == rest:
                del state.draft[len(rest) :]
        accepted = num_accepted(state.draft, rest)
        return Draft((1.0,) * len(state.draft), tuple(float(place < accepted) for place in range(len(state.draft))))

    def close(self) -> None:
        """Lets the drafter delete what it stored for the request."""
        self._drafter.release(self._state)
