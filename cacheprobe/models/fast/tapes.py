"""Chooses, for each pass of a transformers model, between its modules and a tape of their operations."""

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

MOST_TOKENS = 128
"""Largest number of tokens in a pass that is taped: in longer ones, arithmetic takes far longer than Python does."""
_MOST_SHAPES = 6
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
    """Keeps the tapes of one model. The first pass of a shape runs the modules, the second is recorded, the third runs
    both and compares their bits, and later ones run the tape.

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
        self._is_hurried, self._hurried = False, list[_Shape]()

    def __repr__(self) -> str:
        return f"Tapes({len(self._trusted)} shapes{f', refused: {self.refusal}' if self.refusal else ''})"

    def takes(self, cache: StagedCache) -> bool:
        """Returns True if passes of this kind may be taped: few tokens, attention by request, a cache that is written,
        on the CPU."""
        is_plain = type(cache.cache) is KVCache and cache.keys[0].device.type == "cpu"
        return not self.refusal and is_plain and cache.spans is not None and cache.positions.numel() <= MOST_TOKENS

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
        if key not in self._shapes:
            self._keep(key, None)
            if not self._is_hurried:
                return forward.whole(cache)
        tape = self._shapes.pop(key)
        self._shapes[key] = tape  # the last one used
        if tape is not None and not tape.is_current:
            tape = None
            self._trusted.discard(key)
        try:
            if tape is None:
                out = self._record(key, cache, masks, forward, listeners, noting)
            elif key in self._trusted:
                out = self._replay(tape, cache, masks, forward, partial(_call, listeners))
            else:
                out = self._try(key, tape, cache, masks, forward, noting)
            return out if num_layers is None else out.clone()  # the next pass overwrites a tape's memory
        except NotTapedError as refusal:
            self.refusal = str(refusal)
            self._shapes.clear()
            return forward.whole(cache)

    @contextmanager
    def hurrying(self) -> Iterator[None]:
        """Inside the `with`, the first pass of a shape is recorded and the second computed by the tape, without a
        trial: for passes that are timed and whose results nobody uses. Their tapes are dropped at the end."""
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
        self,
        key: _Shape,
        cache: StagedCache,
        masks: Sequence[Tensor],
        forward: ModelForward,
        listeners: Listeners,
        noting: Noting,
    ) -> Tensor:
        """Runs the modules, and records their operations."""
        product = None if self.operations is None else self.operations.compiled
        tape = Tape(self.blocks[: key.num_layers], product, self.dtype, cache, masks)
        self.is_busy = True
        try:
            if self.operations is not None:
                self.operations.tape = tape
            with noting(lambda place, value: tape.noted.update({place: value})), tape.recording() as shown:
                out = forward.whole(shown)
        finally:
            self.is_busy = False
            if self.operations is not None:
                self.operations.tape = None
        self._shapes[key] = tape
        if self._is_hurried:
            self._trusted.add(key)
            self._hurried.append(key)
        _call(listeners, tape.noted)
        return out

    def _try(
        self,
        key: _Shape,
        tape: Tape,
        cache: StagedCache,
        masks: Sequence[Tensor],
        forward: ModelForward,
        noting: Noting,
    ) -> Tensor:
        """Runs the modules and the tape, and trusts the tape if both give the same bits."""
        expected: dict[Place, Tensor] = {}
        with noting(lambda place, value: expected.update({place: value.clone()})):
            out = forward.whole(cache)
        made: dict[Place, Tensor] = {}
        again = self._replay(tape, cache, masks, forward, made.update)
        differing = [place for place, value in expected.items() if not bitwise(made[place].view_as(value), value)]
        if differing or not bitwise(out, again):
            where = "{}{}".format(*differing[0]) if differing else "the logits"
            raise NotTapedError(f"a tape of {key.batch} x {key.width} tokens gives other bits at {where}")
        self._trusted.add(key)
        return out

    def _replay(
        self,
        tape: Tape,
        cache: StagedCache,
        masks: Sequence[Tensor],
        forward: ModelForward,
        done: Callable[[Mapping[Place, Tensor]], None],
    ) -> Tensor:
        self.is_busy = True
        try:
            with tape.replaying(cache, masks, done):
                return forward.outside(cache)
        finally:
            self.is_busy = False


def _call(listeners: Listeners, noted: Mapping[Place, Tensor]) -> None:
    """Calls the listeners of each place with a copy of its activation, whose memory the next pass overwrites."""
    for place, value in noted.items():
        for function in listeners.get(place, ()):
            function(value.clone())
