"""Computes passes whose shape occurs again by a recording, once its bits were those of the modules twice."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from cacheprobe.kvcache.staged import StagedCache
from cacheprobe.models.fast.operations import Listeners
from cacheprobe.models.fast.tape import Place
from cacheprobe.models.fast.torch_operations import NotTapedError
from cacheprobe.ops.equality import bits

MOST_WIDTH = 16
"""Most tokens of a request in a pass that is recorded: in longer passes, arithmetic takes far longer than Python does,
and prompts differ in length."""

Activations = Mapping[Place, Tensor]
Done = Callable[[Activations], None]
"""Function that is called with the activations of a pass."""


class ModelForward(NamedTuple):
    """Holds the forward of a pass, as functions of the staged cache."""

    num_layers: int | None
    """Number of blocks that are computed; None for all."""
    whole: Callable[[StagedCache], Tensor]
    """Runs the modules, with the attention of the pass."""
    outside: Callable[[StagedCache], Tensor]
    """Runs the same without that attention, for blocks that a tape computes."""
    masks: Callable[[], Sequence[Tensor]]
    """Returns the masks of the pass."""
    noting: Callable[[Iterable[Place], Callable[[Place, Tensor], None]], AbstractContextManager[None]]
    """Gives a context manager inside which a function is called with the activations of these places, by hooks."""


@runtime_checkable
class RepeatedPass(Protocol):
    """Describes what computes passes of one shape (a Protocol)."""

    @property
    def noted(self) -> Activations:
        """Activations of the last pass."""
        ...

    @property
    def num_bytes(self) -> int:
        """Memory of the results."""
        ...


R = TypeVar("R", bound=RepeatedPass)


class RepeatedPasses(ABC, Generic[R]):
    """Keeps the recordings of one model. The first pass of a shape runs the modules. The second and third run them too,
    and then make a recording or run it: it is trusted if its bits were those of the modules both times. Later passes
    run it.

    Twin: the modules, bitwise: tests.models.test_tapes and tests.device.test_graphs.
    """

    most_bytes: int
    """Most memory of all recordings together."""
    most_shapes: int
    """Shapes of passes that are kept; the one that was not used for longest is dropped for another."""

    def __init__(self) -> None:
        self.refusal = ""
        """Why no pass of this model is recorded any more; "" while passes are."""
        self.is_busy = False
        """Whether a recording is made or run: hooks are then not called, listeners are."""
        self._shapes: dict[Hashable, R | None] = {}
        self._trusted: set[Hashable] = set()
        self._too_large: set[Hashable] = set()
        self._is_hurried, self._hurried = False, list[Hashable]()

    def __repr__(self) -> str:
        refused = f", refused: {self.refusal}" if self.refusal else ""
        return f"{type(self).__name__}({len(self._trusted)} shapes{refused})"

    @abstractmethod
    def takes(self, cache: StagedCache, logit_slots: Sequence[int] | None) -> bool:
        """Returns True if passes of this kind may be recorded."""

    @abstractmethod
    def _places(self, num_layers: int | None, listeners: Listeners) -> Sequence[Place]:
        """Returns the places whose activations a recording notes."""

    @abstractmethod
    def _key(self, cache: StagedCache, num_layers: int | None, places: Sequence[Place]) -> Hashable:
        """Returns what passes have in common if they share a recording."""

    @abstractmethod
    def _record(self, cache: StagedCache, forward: ModelForward, places: Sequence[Place]) -> tuple[R, Tensor]:
        """Returns a recording of the modules' pass, and its result."""

    @abstractmethod
    def _replay(self, recording: R, cache: StagedCache, forward: ModelForward, done: Done) -> Tensor:
        """Returns the result of a pass by a recording, after it called `done` with the activations."""

    @abstractmethod
    def _call(self, listeners: Listeners, noted: Activations) -> None:
        """Calls the listeners of each place with an activation that no later pass overwrites."""

    def run(self, cache: StagedCache, forward: ModelForward, listeners: Listeners) -> Tensor:
        """Returns the result of a pass, by modules or by a recording, and calls the listeners or lets the hooks do
        so."""
        places = self._places(forward.num_layers, listeners)
        key = self._key(cache, forward.num_layers, places)
        if key in self._too_large:
            return forward.whole(cache)
        if key not in self._shapes:
            self._keep(key, None)
            if not self._is_hurried:
                return forward.whole(cache)
        recording = self._shapes.pop(key)
        self._shapes[key] = recording  # the last one used
        if recording is not None and key in self._trusted:
            return self._replay(recording, cache, forward, partial(self._call, listeners))
        expected: dict[Place, Tensor] = {}
        with forward.noting(places, lambda place, value: expected.update({place: value.clone()})):
            out = forward.whole(cache)
        is_first = recording is None
        try:
            if recording is None:
                recording, again = self._record(cache, forward, places)
            else:
                again = self._replay(recording, cache, forward, lambda noted: None)
            self._require_equal(cache, (expected, out), (recording.noted, again))
        except Exception as refusal:  # whatever a family's own code does not allow
            self.refusal = str(refusal) or type(refusal).__name__
            self.forget()
            with self._silently():  # writes the keys and values again
                forward.whole(cache)
            return out
        if self._is_hurried:
            self._hurried.append(key)
        if self._is_hurried or not is_first:
            self._trusted.add(key)
        self._shapes[key] = recording
        self._drop_oldest()
        return out

    def _require_equal(
        self, cache: StagedCache, wanted: tuple[Activations, Tensor], made: tuple[Activations, Tensor]
    ) -> None:
        """Raises: NotTapedError if activations or the result have other bits."""
        (expected, out), (noted, again) = wanted, made
        pairs = [(noted[place].view_as(value), value) for place, value in expected.items()] + [(again, out)]
        is_same = torch.stack([(bits(a) == bits(b)).all() for a, b in pairs]).tolist()  # waits for a GPU once
        differing = [
            place
            for place, same in zip([*map("{0[0]}{0[1]}".format, expected), "the logits"], is_same, strict=True)
            if not same
        ]
        if differing:
            batch, width = cache.positions.shape
            raise NotTapedError(f"a recording of {batch} x {width} tokens gives other bits at {differing[0]}")

    def _drop_oldest(self) -> None:
        """Drops the recordings that were not used for longest while all together are too large; one that is too large
        by itself is dropped, and its shape is not recorded again."""
        kept = {key: one.num_bytes for key, one in self._shapes.items() if one is not None}
        for key in list(kept):
            if sum(kept.values()) <= self.most_bytes:
                break
            if len(kept) == 1:
                self._too_large.add(key)
            del kept[key]
            self._drop(key)

    def _drop(self, key: Hashable) -> None:
        self._shapes.pop(key, None)
        self._trusted.discard(key)

    @contextmanager
    def _silently(self) -> Iterator[None]:
        """Calls no hook of a capture inside the `with`."""
        try:
            self.is_busy = True
            yield
        finally:
            self.is_busy = False

    @contextmanager
    def hurrying(self) -> Iterator[None]:
        """Inside the `with`, the first pass of a shape is recorded, and the second one computed by the recording
        without a second comparison: for passes that are timed. These recordings are dropped at the end."""
        self._is_hurried = True
        try:
            yield
        finally:
            self._is_hurried = False
            for key in self._hurried:
                self._drop(key)
            self._hurried.clear()

    def forget(self) -> None:
        """Drops all recordings, because a weight or a module was replaced."""
        self._shapes.clear()
        self._trusted.clear()

    def _keep(self, key: Hashable, recording: R | None) -> None:
        while len(self._shapes) >= self.most_shapes:
            self._drop(next(iter(self._shapes)))
        self._shapes[key] = recording
