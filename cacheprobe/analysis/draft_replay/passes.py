"""Replays the verify passes of one request over its committed text."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, Protocol, runtime_checkable

from cacheprobe.core.records import Request, SamplingParams
from cacheprobe.engine.loop import FIRST_DRAFT_LENGTH


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


@runtime_checkable
class DraftSource(Protocol):
    """Gives the drafts of one request."""

    def draft(self, position: int, limit: int) -> Draft:
        """Returns the draft of at most `limit` (1 or more) tokens that follows the committed token at `position`.

        Called with positions that never fall.
        """
        ...


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
    text: CommittedText, source: DraftSource, window: int, draft_length: "int | str | None" = None
) -> list[ReplayedPass]:
    """Returns the verify passes, by position, in which the committed text would be written again with another drafter.

    window: tokens of one pass.  draft_length: as the option of `cp.run`.
    The limits of a draft, the token that the verifier adds, and the adaptive length are those of the engine's loop. If
    a probability is neither 0 nor 1, every possible sequence of passes counts with its probability.
    Twin: tests.twins.measures_slowly.expected_passes_slowly, close(1e-9).
    """
    cap = min(FIRST_DRAFT_LENGTH, window - 1) if isinstance(draft_length, str) else draft_length
    weights: dict[int, dict[int | None, float]] = {text.first: {cap: 1.0}}
    passes = []
    for position in range(text.first, text.last):
        for cap, weight in weights.pop(position, {}).items():
            limit = min(window - 1, text.num_left(position) - 1, window if cap is None else cap)
            draft = source.draft(position, limit) if limit > 0 else Draft((), ())
            survival = _products(draft.agrees)
            passes.append(ReplayedPass(position, weight, draft.has_token, survival))
            for accepted, probability in enumerate(_exactly(survival)):
                if probability > 0:
                    is_adaptive = isinstance(draft_length, str) and bool(draft.agrees)
                    cap_after = _adapted(cap, accepted == len(draft.agrees), window) if is_adaptive else cap
                    after = weights.setdefault(min(position + accepted + 1, text.last), {})
                    after[cap_after] = after.get(cap_after, 0.0) + weight * probability
    return passes


def _products(factors: Sequence[float]) -> tuple[float, ...]:
    """Returns the product of the factors up to each one."""
    products, product = [], 1.0
    for factor in factors:
        product *= factor
        products.append(product)
    return tuple(products)


def _exactly(survival: Sequence[float]) -> list[float]:
    """Returns the probability that exactly 0, 1, ... tokens are accepted, from those of at least 1, 2, ..."""
    at_least = [1.0, *survival, 0.0]
    return [more - fewer for more, fewer in pairwise(at_least)]


def _adapted(cap: int | None, is_full: bool, window: int) -> int | None:
    """Returns the adaptive length after a pass: 2 more if the whole draft was accepted, else 1 less."""
    assert cap is not None
    return min(cap + 2, max(window - 1, 1)) if is_full else max(cap - 1, 1)
