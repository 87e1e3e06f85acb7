"""The interface of a drafter, and of the engine functions that a drafter may call."""

from collections.abc import Sequence
from typing import ClassVar, Protocol, runtime_checkable

from torch import Tensor

from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.models.base import CachedLM


@runtime_checkable
class DraftContext(Protocol):
    """The engine functions that a drafter may call: recorded forwards, and each request's own token choice."""

    model: CachedLM

    def feed_newest(self, states: Sequence[SequenceState], num_layers: int | None = None) -> Tensor:
        """Feeds each request's newest token in one batch, writing keys and values to the request's cache row.

        Returns logits [b, v], or the residual stream [b, m] after `num_layers` blocks if given.
        """
        ...

    def choose(self, state: SequenceState, logits: Tensor, drafted: Sequence[int] = ()) -> int:
        """Returns the token that this request would choose from logits [v], with its own settings and keyed noise.

        drafted: draft tokens of the same `extend` call that stand between the request's newest token and this one.
        """
        ...


@runtime_checkable
class Drafter(Protocol):
    """Proposes draft tokens. The verifier checks them, so wrong tokens change the cost of a run but never its output.

    A drafter that does not run the verified model, or stops before its last block, declares `drafted_layers`. A call
    that exceeds `deadline_seconds` ends its requests.
    """

    name: ClassVar[str]

    def extend(self, context: DraftContext, states: Sequence[SequenceState]) -> list[list[int]]:
        """Returns the next draft tokens of each request; an empty list if the request's draft should be verified
        now."""
        ...

    def release(self, state: SequenceState) -> None:
        """Forgets what was stored for a request, which has left its cache row."""
        ...

    def check(self, model: CachedLM) -> None:
        """Raises: ValueError if this drafter cannot draft for this model."""
        ...


def drafted_layers(drafter: Drafter, model: CachedLM) -> int:
    """Returns how many of the model's blocks the drafter runs; interventions reach its drafts only in these blocks.

    Reads the attribute `drafted_layers` (0 for a drafter that runs another model or none); all blocks if absent.
    """
    declared = getattr(drafter, "drafted_layers", None)
    return model.n_layers if declared is None else declared


DEADLINE_SECONDS = 60.0
"""Default limit for one call of a drafter, without the time of the verified model's passes."""


def deadline_seconds(drafter: Drafter) -> float | None:
    """Returns the time limit of one call of a user's drafter: its attribute `deadline_seconds`, 60 if absent.

    None means no deadline; the drafter then runs in the thread that called `cp.run`, otherwise in a thread of its own.
    """
    return getattr(drafter, "deadline_seconds", DEADLINE_SECONDS)
