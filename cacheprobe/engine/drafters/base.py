"""Defines the interface of a drafter. A drafter proposes draft tokens, which the verifier accepts or rejects.

To add a drafter, write one file in this folder, such as repeat_last.py, which drafts the newest token three times:

    from cacheprobe.core.registry import register
    from cacheprobe.engine.drafters.base import Drafter


    @register("drafters", "repeat_last")
    class RepeatLast(Drafter):
        name = "repeat_last"  # equal to the registered name
        drafted_layers = 0  # runs no block of the verified model

        def extend(self, context, states):
            return [[] if state.draft else [state.token_ids[-1]] * 3 for state in states]

- Class Drafter below says what each method does. `check`, `release` and the repr have working defaults; a frozen
  dataclass has settings too. Two attributes are optional: `drafted_layers` and `deadline_seconds`.
- `extend` is called again and again for one draft. `state.draft` holds the tokens of the earlier calls. The draft goes
  to the verifier when it is full (at most window - 1 tokens), or when `extend` returns an empty list for its request.
- The registry imports every file of this folder, so that `--drafter repeat_last` works at once. Add the class to
  __init__.py and its `__all__`, so that it is `cp.drafters.RepeatLast`.
- tests/drafters/test_drafters.py finds the class: `test_the_contract` runs the drafter in the engine and compares the
  committed tokens with those of a run without a drafter. A class that needs arguments has a line in EXAMPLES there.
- The name repeat_last is taken: a test runs the same example in docs/plugins.md.
"""

import threading
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

from torch import Tensor

from cacheprobe.core.values import number, repr_of_settings
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.models.base import CachedLM


@runtime_checkable
class DraftContext(Protocol):
    """Defines the engine's functions that a drafter may call: a decode pass of the verified model, which is recorded,
    and the choice of a token."""

    model: CachedLM

    def feed_newest(self, states: Sequence[SequenceState], num_layers: int | None = None) -> Tensor:
        """Runs the verified model on each request's newest token, drafted or committed, in one batch. Returns logits
        [b, v].

        With `num_layers`, stops after that many layers and returns the residual stream [b, m] instead.
        Keys and values are written to the cache row of each request.
        """
        ...

    def choose(self, state: SequenceState, logits: Tensor, drafted: Sequence[int] = ()) -> int:
        """Returns the token id that a request would choose next from logits [v], by its own sampling settings.

        drafted: draft tokens of the same `extend` call that come before this one.
        The sampling noise is the verifier's own, so that both choose alike. With acceptance="rejection" it is another
        noise, for verified requests that are neither deterministic nor greedy.
        """
        ...


@runtime_checkable
class Drafter(Protocol):
    """Proposes draft tokens. The verifier (passes of the whole model) decides which ones are committed. A class that is
    derived from this one must define `name` and `extend` alone.

    drafted_layers (optional attribute): how many layers of the verified model a draft runs; all if absent.
    deadline_seconds (optional attribute): limit of one call, see the function `deadline_seconds`. A request ends with
        an error if a call for this request alone, while it has no draft token, exceeds the limit.
    """

    name: ClassVar[str]

    def extend(self, context: DraftContext, states: Sequence[SequenceState]) -> list[list[int]]:
        """Returns a list of draft token ids for each request; an empty list sends the request's draft to the verifier.

        Called again until each draft is full or its list is empty. state.draft: the tokens of earlier calls. Tokens
        beyond the window are cut.
        """
        ...

    def release(self, state: SequenceState) -> None:
        """Deletes what the drafter stored for a request. Called when the request ends, and when it is preempted.

        A preempted request returns later. The request may never have drafted. By default nothing is stored.
        """

    def check(self, model: CachedLM) -> None:
        """Raises: ValueError if this drafter cannot draft for this model. By default it can for every model."""

    def __repr__(self) -> str:
        """Returns the name of the class and its settings, as a run stores them."""
        return repr_of_settings(self)


def drafted_layers(drafter: Drafter, model: CachedLM) -> int:
    """Returns the number of the model's layers that a drafter runs. Interventions act on drafts in these layers only.

    Reads the attribute `drafted_layers` (0 for a drafter that runs another model or none); all layers if absent.
    """
    declared = getattr(drafter, "drafted_layers", None)
    return model.n_layers if declared is None else declared


DEADLINE_SECONDS = 60.0
"""Default time limit in seconds of one call of a user's drafter, without the passes of the verified model."""


MAX_DEADLINE = threading.TIMEOUT_MAX / 20
"""Maximum of a drafter's deadline_seconds: Python can still wait for ten such deadlines."""


def deadline_seconds(drafter: Drafter) -> float | None:
    """Returns the time limit in seconds of one call of a user's drafter: its attribute `deadline_seconds`, else 60.

    None means no limit; the drafter then runs in the thread that called `cp.run`. With a limit, a user's drafter runs
    in a second thread; for drafters of cacheprobe that run no function or lens of the user, the limit has no effect.
    """
    return getattr(drafter, "deadline_seconds", DEADLINE_SECONDS)


def require_drafter(drafter: Any, model: CachedLM | None) -> None:
    """Raises: ValueError if `drafter` is no drafter object, has a deadline out of range, or refuses this model. model:
    None if it is not at hand, as for a stored run."""
    missing = [part for part in ("name", "extend", "release", "check") if not hasattr(drafter, part)]
    if isinstance(drafter, type) or missing:
        lacks = f", which has no {missing[0]}" if missing and not isinstance(drafter, type | str) else ""
        raise ValueError(
            f"a drafter is an object such as cp.drafters.EarlyExit(layer=20), got {drafter!r:.60}{lacks}; names stand "
            "only in command lines"
        )
    seconds = deadline_seconds(drafter)
    if seconds is not None and not 0 < number("deadline_seconds", seconds) <= MAX_DEADLINE:
        raise ValueError(
            f"deadline_seconds of drafter {drafter.name} must be above 0 and at most {MAX_DEADLINE:.0f}, or None for "
            f"no deadline, got {seconds}"
        )
    try:
        drafter.check(model) if model is not None else None
    except ValueError:
        raise
    except Exception as error:  # a user's own code
        raise ValueError(f"check of drafter {drafter.name} failed, {type(error).__name__}: {error!s:.200}") from error
