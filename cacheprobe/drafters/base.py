"""What a drafter offers, and what the engine lends it."""

from collections.abc import Sequence
from typing import ClassVar, Protocol, runtime_checkable

from torch import Tensor

from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.models.base import CachedLM


@runtime_checkable
class DraftContext(Protocol):
    """The engine's side: forwards that are recorded and accounted for, and each request's own way to choose."""

    model: CachedLM

    def feed_newest(self, states: Sequence[SequenceState], num_layers: int | None = None) -> Tensor:
        """Feed each request's newest token in one batch, writing its cache row.

        Returns logits [b, v], or the residual stream [b, m] after `num_layers` blocks where that is given.
        """
        ...

    def choose(self, state: SequenceState, logits: Tensor, drafted: Sequence[int] = ()) -> int:
        """The token that this request would take from logits [v], by its own settings and keyed noise.

        drafted: candidates of the same `extend` that stand between the request's newest token and this one.
        """
        ...


@runtime_checkable
class Drafter(Protocol):
    """Proposes continuations. Candidates are hints: any tokens at all change the cost and never the output.

    One that does not run the verified model, or stops before its end, says so: see `drafted_layers`. A call that does
    not return in time ends the requests that it was for: see `deadline_seconds`.
    """

    name: ClassVar[str]

    def extend(self, context: DraftContext, states: Sequence[SequenceState]) -> list[list[int]]:
        """The next candidate tokens of each request, at least one; none where its draft should be verified now."""
        ...

    def release(self, state: SequenceState) -> None:
        """The request has left its cache row: forget what was kept for it."""
        ...

    def check(self, model: CachedLM) -> None:
        """Raise ValueError where this drafter cannot serve this model."""
        ...


def drafted_layers(drafter: Drafter, model: CachedLM) -> int:
    """How many of the model's blocks a drafter runs to draft, which is where interventions can reach its drafts.

    Its attribute `drafted_layers`, 0 where it runs another model or none; all of them where it does not say.
    """
    told = getattr(drafter, "drafted_layers", None)
    return model.n_layers if told is None else told


DEADLINE_SECONDS = 60.0
"""For one call of a drafter's, passes of the verified model apart."""


def deadline_seconds(drafter: Drafter) -> float | None:
    """How long one call of a user's own drafter may take: its attribute `deadline_seconds`, 60 where it has none.

    None for no deadline; the drafter then runs in the thread that called `cp.run`, and not in one of its own.
    """
    return getattr(drafter, "deadline_seconds", DEADLINE_SECONDS)
