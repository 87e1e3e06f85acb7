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
  dataclass has settings too. The attributes `drafted_layers` and `always_drafts` are optional: a drafter that is there
  to save time sets always_drafts = False.
- `extend` is called again and again for one draft. `state.draft` holds the tokens of the earlier calls. The draft goes
  to the verifier when it is full (at most window - 1 tokens), or when `extend` returns an empty list for its request.
- The registry imports every file of this folder, so that `--drafter repeat_last` works at once. Add the class to
  __init__.py and its `__all__`, so that it is `cp.drafters.RepeatLast`.
- tests/drafters/test_drafters.py finds the class: `test_the_contract` runs the drafter in the engine and compares the
  committed tokens with those of a run without a drafter. A class that needs arguments has a line in EXAMPLES there.
- The name repeat_last is taken: a test runs the same example in docs/plugins.md.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from inspect import Parameter, signature
from itertools import islice
from typing import Any, ClassVar, Protocol, runtime_checkable

from torch import Tensor

from cacheprobe.core.records import EngineError, ObserverError, RowSlot
from cacheprobe.core.registry import available, same_name
from cacheprobe.core.values import repr_of_settings, whole_number
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.models.base import CachedLM
from cacheprobe.models.heads.lm import DraftHeadLM


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

    def choose(
        self, states: Sequence[SequenceState], logits: Tensor, drafted: Sequence[Sequence[int]] | None = None
    ) -> list[int]:
        """Returns the token id that each request would choose next from its row of logits [b, v], by its own sampling
        settings.

        drafted: for each request, the draft tokens of the same `extend` call that come before this one.
        The sampling noise is the verifier's own, so that both choose alike. With acceptance="rejection" it is another
        noise, for verified requests that are neither deterministic nor greedy.
        """
        ...

    def target_states(self, state: SequenceState, start: int, end: int) -> Tensor:
        """Returns the verified model's states [p, l, m] at positions start..end-1 of a request's committed text, the
        prompt included, at the l sites that the drafter's head reads. The newest committed token has none yet."""
        ...

    def recording(self, rows: Sequence[RowSlot], shape: tuple[int, int]) -> AbstractContextManager[None]:
        """Returns a context manager, inside which one pass of the drafter's head runs, so that the run records it and
        its interventions act on it.

        rows: of the pass; those of a committed token are canonical.  shape: (batch, token slots) of the pass.
        """
        ...


@runtime_checkable
class Drafter(Protocol):
    """Proposes draft tokens. The verifier (passes of the whole model) decides which ones are committed. A class that is
    derived from this one must define `name` and `extend` alone.

    drafted_layers (optional attribute): how many layers of the verified model a draft runs; all if absent.
    head(model) (optional method): the draft head, a DraftHeadLM, which reads states of the model, and whose passes a
    run records.
    always_drafts (optional attribute): False if draft_length="adaptive" may leave out drafts that take more time than
    they save. The run then calls the drafter on a few other texts first, to measure the time. True if absent.
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


def head_of(drafter: Drafter | None, model: CachedLM) -> DraftHeadLM | None:
    """Returns the draft head that a drafter runs for this model; None if it runs none."""
    made = getattr(drafter, "head", None)
    return None if made is None else made(model)


def always_drafts(drafter: Drafter) -> bool:
    """Returns whether a drafter drafts as often as it can, though that takes time: its attribute `always_drafts`, True
    if absent."""
    return getattr(drafter, "always_drafts", True)


def require_drafter(drafter: Any, model: CachedLM | None) -> None:
    """Raises: ValueError if `drafter` is no drafter object, or refuses this model. model: None if it is not at hand, as
    for a stored run."""
    missing = [part for part in ("name", "extend", "release", "check") if not hasattr(drafter, part)]
    if isinstance(drafter, type) or missing:
        lacks = f", which has no {missing[0]}" if missing and not isinstance(drafter, type | str) else ""
        raise ValueError(
            f"a drafter is an object such as cp.drafters.EarlyExit(layer=20), got {drafter!r:.60}{lacks}; "
            f"{_how_to_make(drafter)}"
        )
    try:
        drafter.check(model) if model is not None else None
    except ValueError:
        raise
    except Exception as error:  # a user's own code
        raise ValueError(f"check of drafter {drafter.name} failed, {type(error).__name__}: {error!s:.200}") from error


def _how_to_make(given: object) -> str:
    """Returns the end of an error message: how to make a drafter from what was given instead of one, such as "write
    drafter=cp.drafters.EarlyExit(layer=...)" for the name "early_exit" and for the class."""
    known = available("drafters")
    name, _, settings = given.partition(":") if isinstance(given, str) else ("", "", "")
    chosen = given if isinstance(given, type) else known.get(same_name(name.lower(), known) or "")
    if chosen is not None:
        needed = [one.name for one in signature(chosen).parameters.values() if one.default is Parameter.empty]
        settings = settings or ", ".join(f"{setting}=..." for setting in needed)
        return f"write drafter=cp.drafters.{chosen.__name__}({settings})"
    if hasattr(given, "new_cache") or hasattr(given, "generate"):
        loaded = "model" if hasattr(given, "new_cache") else "cp.load_model(model)"
        return f"write drafter=cp.drafters.DraftModel({loaded})"
    return f"there are {', '.join(made.__name__ for made in known.values())} in cp.drafters"


def propose(
    drafter: Drafter, context: DraftContext, states: Sequence[SequenceState], step: int, max_tokens: int
) -> list[tuple[int, ...]]:
    """Calls the drafter once. Returns a list with one tuple of up to `max_tokens` draft token ids for each request.

    Raises: EngineError, with the requests and the step, if the drafter raises or returns no lists of token ids.
    """
    numbers = ", ".join(str(state.request_id) for state in states)
    try:
        return _checked(drafter.extend(context, states), states, max_tokens, step, drafter.name)
    except (EngineError, ObserverError):
        raise
    except Exception as error:  # a user's own code may raise anything; it fails these requests only
        raise EngineError(
            f"request{'s' * (len(states) > 1)} {numbers} step {step}: drafter {drafter.name} failed with "
            f"{type(error).__name__}: {error!s:.200}"
        ) from error


def release(drafter: Drafter | None, state: SequenceState) -> None:
    """Calls the drafter's `release` for a request that left its cache row. Warns if the call fails. Does nothing
    without a drafter."""
    if drafter is None:
        return
    try:
        drafter.release(state)
    except Exception as error:
        warnings.warn(
            f"request {state.request_id}: drafter {drafter.name} failed with {type(error).__name__}: {error!s:.200}, "
            "in release",
            RuntimeWarning,
            stacklevel=2,
        )


def _checked(
    result: Any, states: Sequence[SequenceState], max_tokens: int, step: int, name: str
) -> list[tuple[int, ...]]:
    """Returns a drafter's result as a list with one tuple of up to `max_tokens` token ids for each request. Raises:
    EngineError if the result is not one list of whole numbers for each request."""
    numbers = ", ".join(str(state.request_id) for state in states)
    wanted = f"must return {len(states)} lists of token ids, one for each request"
    if not _is_list(result):
        raise EngineError(f"requests {numbers} step {step}: drafter {name} {wanted}, got {result!r:.60}")
    proposals = list(islice(result, len(states) + 1))
    if len(proposals) != len(states):
        count = len(result) if hasattr(result, "__len__") else f"{len(proposals)} or more"
        raise EngineError(f"requests {numbers} step {step}: drafter {name} {wanted}, got {count} lists")
    kept = []
    for state, token_ids in zip(states, proposals, strict=True):
        where = f"request {state.request_id} step {step}: drafter {name}"
        if not _is_list(token_ids):
            raise EngineError(f"{where} must propose a list of token ids, got {token_ids!r:.60}")
        try:
            kept.append(tuple(whole_number("a proposed token", token_id) for token_id in islice(token_ids, max_tokens)))
        except ValueError as error:
            raise EngineError(f"{where}: {error}; propose token ids") from error
    return kept


def _is_list(value: object) -> bool:
    """Returns True for an iterable that is neither text nor bytes nor a mapping."""
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | bytearray | Mapping)
