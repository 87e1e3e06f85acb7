"""Chooses, for each pass of a transformers model, between its modules and a tape of their operations."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cacheprobe.kvcache.cache import KVCache
from cacheprobe.kvcache.staged import StagedCache
from cacheprobe.models.fast.operations import Listeners, LoopOperations
from cacheprobe.models.fast.tape import Place, Tape
from cacheprobe.models.fast.torch_operations import NotTapedError
from cacheprobe.ops.equality import bitwise

MOST_TOKENS, MOST_WIDTH = 128, 16
"""Most tokens of a pass that is taped, and of a request in it: in longer passes, arithmetic takes far longer than
Python does, and prompts differ in length."""
MOST_BYTES = 2**28
"""Most memory of all tapes of a model."""
_MOST_SHAPES = 12
"""Shapes of passes that are kept; the one that was not used for longest is dropped for another."""

Noting = Callable[[Callable[[Place, Tensor], None]], AbstractContextManager[None]]
"""Gives a context manager inside which a function is called with the activation of every place, by hooks."""


class _Shape(NamedTuple):
    """Holds what passes have in common if they share a tape."""

    num_layers: int | None
    """Number of blocks that are computed; None for all."""
    batch: int
    width: int
    attending: tuple[bool, ...]
    """Whether the attention of each batch index is computed."""
    has_duplicate: bool
    """Whether a batch index computes the tokens of another one."""


class ModelForward(NamedTuple):
    """Holds the forward of a pass, as functions of the staged cache."""

    whole: Callable[[StagedCache], Tensor]
    """Runs the modules, with the attention of the pass."""
    outside: Callable[[StagedCache], Tensor]
    """Runs the same without that attention, for blocks that a tape computes."""


class Tapes:
    """Keeps the tapes of one model. The first pass of a shape runs the modules. The second and third run them too, and
    then record a tape or run it: it is trusted if its bits were those of the modules both times. Later ones run it.

    Twin: the modules, bitwise: tests.models.test_tapes.
    """

    def __init__(self, blocks: Sequence[nn.Module], operations: LoopOperations | None, dtype: torch.dtype) -> None:
        """operations: of the modules that compiled loops compute; None if torch computes all."""
        self.blocks, self.operations, self.dtype = blocks, operations, dtype
        self.refusal = ""
        """Why no pass of this model is taped any more; "" while passes are."""
        self.is_busy = False
        """Whether a pass is recorded or computed by a tape: hooks are then not called, listeners are."""
        self._shapes: dict[_Shape, Tape | None] = {}
        self._trusted: set[_Shape] = set()
        self._too_large: set[_Shape] = set()
        self._is_hurried, self._hurried = False, list[_Shape]()

    def __repr__(self) -> str:
        return f"Tapes({len(self._trusted)} shapes{f', refused: {self.refusal}' if self.refusal else ''})"

    def __deepcopy__(self, memo: dict[int, object]) -> "Tapes":
        """Returns Tapes of the copied blocks without any tape: tapes hold addresses."""
        return Tapes(copy.deepcopy(self.blocks, memo), copy.deepcopy(self.operations, memo), self.dtype)

    def takes(self, cache: StagedCache) -> bool:
        """Returns True if passes of this kind may be taped: few tokens, attention by request, a cache that is written,
        on the CPU."""
        is_plain = type(cache.cache) is KVCache and cache.keys[0].device.type == "cpu"
        attends = cache.spans is not None and any(cache.spans.pieces)
        is_short = cache.positions.numel() <= MOST_TOKENS and cache.positions.shape[1] <= MOST_WIDTH
        return not self.refusal and is_plain and attends and is_short

    def run(
        self,
        cache: StagedCache,
        masks: Sequence[Tensor],
        num_layers: int | None,
        forward: ModelForward,
        listeners: Listeners,
        noting: Noting,
    ) -> Tensor:
        """Returns the result of a pass, by modules or by a tape, and calls the listeners or lets the hooks do so."""
        assert cache.spans is not None
        attending = tuple(bool(pieces) for pieces in cache.spans.pieces)
        batch, width = cache.positions.shape
        key = _Shape(num_layers, batch, width, attending, cache.duplicate is not None)
        if key in self._too_large:
            return forward.whole(cache)
        if key not in self._shapes:
            self._keep(key, None)
            if not self._is_hurried:
                return forward.whole(cache)
        tape = self._shapes.pop(key)
        self._shapes[key] = tape  # the last one used
        if tape is not None and key in self._trusted:
            out = self._replay(tape, cache, masks, forward, partial(_call, listeners))
            return out if num_layers is None else out.clone()  # the next pass overwrites a tape's memory
        expected: dict[Place, Tensor] = {}
        with noting(lambda place, value: expected.update({place: value.clone()})):
            out = forward.whole(cache)
        try:
            if tape is None:
                tape, again = self._record(key, cache, masks, forward, noting)
            else:
                again = self._replay(tape, cache, masks, forward, lambda noted: None)
            self._require_equal(key, (expected, out), (tape.noted, again))
        except Exception as refusal:  # whatever a family's own code does not allow
            self.refusal = str(refusal) or type(refusal).__name__
            self.forget()
            with self._silently():  # writes the keys and values again
                forward.whole(cache)
            return out
        if self._shapes[key] is not None:
            self._trusted.add(key)
        self._shapes[key] = tape
        self._drop_oldest()
        return out

    def _require_equal(
        self, key: _Shape, wanted: tuple[Mapping[Place, Tensor], Tensor], made: tuple[Mapping[Place, Tensor], Tensor]
    ) -> None:
        """Raises: NotTapedError if activations or the result have other bits."""
        (expected, out), (noted, again) = wanted, made
        differing = [place for place, value in expected.items() if not bitwise(noted[place].view_as(value), value)]
        if differing or not bitwise(out, again):
            where = "{}{}".format(*differing[0]) if differing else "the logits"
            raise NotTapedError(f"a tape of {key.batch} x {key.width} tokens gives other bits at {where}")

    def _drop_oldest(self) -> None:
        """Drops the tapes that were not used for longest while all together are too large; a tape that is too large by
        itself is dropped, and its shape is not taped again."""
        kept = {key: tape.num_bytes for key, tape in self._shapes.items() if tape is not None}
        for key in list(kept):
            if sum(kept.values()) <= MOST_BYTES:
                break
            if len(kept) == 1:
                self._too_large.add(key)
            del self._shapes[key], kept[key]
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
        """Inside the `with`, the first pass of a shape is recorded, and the second one computed by the tape without a
        second comparison: for passes that are timed. Their tapes are dropped at the end."""
        self._is_hurried = True
        try:
            yield
        finally:
            self._is_hurried = False
            for key in self._hurried:
                self._shapes.pop(key, None)
                self._trusted.discard(key)
            self._hurried.clear()

    def forget(self) -> None:
        """Drops all tapes, because a weight or a module was replaced."""
        self._shapes.clear()
        self._trusted.clear()

    def _keep(self, key: _Shape, tape: Tape | None) -> None:
        while len(self._shapes) >= _MOST_SHAPES:
            oldest = next(iter(self._shapes))
            del self._shapes[oldest]
            self._trusted.discard(oldest)
        self._shapes[key] = tape

    def _record(
        self, key: _Shape, cache: StagedCache, masks: Sequence[Tensor], forward: ModelForward, noting: Noting
    ) -> tuple[Tape, Tensor]:
        """Runs the modules, and returns the tape of their operations, and the result."""
        product = None if self.operations is None else self.operations.compiled
        tape = Tape(self.blocks[: key.num_layers], product, self.dtype, cache, masks)
        try:
            if self.operations is not None:
                self.operations.tape = tape
            note = noting(lambda place, value: tape.noted.update({place: value}))
            with self._silently(), note, tape.recording() as shown:
                out = forward.whole(shown)
        finally:
            if self.operations is not None:
                self.operations.tape = None
        if self._is_hurried:
            self._shapes[key] = tape  # trusted at once
            self._hurried.append(key)
        return tape, out

    def _replay(
        self,
        tape: Tape,
        cache: StagedCache,
        masks: Sequence[Tensor],
        forward: ModelForward,
        done: Callable[[Mapping[Place, Tensor]], None],
    ) -> Tensor:
        with self._silently(), tape.replaying(cache, masks, done):
            return forward.outside(cache)


def _call(listeners: Listeners, noted: Mapping[Place, Tensor]) -> None:
    """Calls the listeners of each place with a copy of its activation, whose memory the next pass overwrites."""
    for place, value in noted.items():
        for function in listeners.get(place, ()):
            function(value.clone())
