"""Chooses, for each pass of a transformers model on the CPU, between its modules and a tape of their operations."""

import copy
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from torch import Tensor, dtype, nn

from cacheprobe.core.hook_names import SITES
from cacheprobe.kvcache.cache import KVCache
from cacheprobe.kvcache.staged import StagedCache
from cacheprobe.models.fast.operations import Listeners, LoopOperations
from cacheprobe.models.fast.repeated import MOST_WIDTH, Activations, Done, ModelForward, RepeatedPasses
from cacheprobe.models.fast.tape import Place, Tape

MOST_TOKENS = 128
"""Most tokens of a pass that is taped."""


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


class Tapes(RepeatedPasses[Tape]):
    """Keeps the tapes of one model.

    Twin: the modules, bitwise: tests.models.test_tapes.
    """

    most_bytes, most_shapes = 2**28, 12

    def __init__(self, blocks: Sequence[nn.Module], operations: LoopOperations | None, dtype: dtype) -> None:
        """operations: of the modules that compiled loops compute; None if torch computes all."""
        super().__init__()
        self.blocks, self.operations, self.dtype = blocks, operations, dtype

    def __deepcopy__(self, memo: dict[int, object]) -> "Tapes":
        """Returns Tapes of the copied blocks without any tape: tapes hold addresses."""
        return Tapes(copy.deepcopy(self.blocks, memo), copy.deepcopy(self.operations, memo), self.dtype)

    def takes(self, cache: StagedCache, logit_slots: Sequence[int] | None) -> bool:
        """Returns True if passes of this kind may be taped: few tokens, attention by request, a cache that is written,
        on the CPU."""
        is_plain = type(cache.cache) is KVCache and cache.keys[0].device.type == "cpu"
        attends = cache.spans is not None and any(cache.spans.pieces)
        is_short = cache.positions.numel() <= MOST_TOKENS and cache.positions.shape[1] <= MOST_WIDTH
        return not self.refusal and is_plain and attends and is_short

    def _places(self, num_layers: int | None, listeners: Listeners) -> Sequence[Place]:
        """Returns all sites of all layers, since listeners change."""
        return list(product(("pre", *SITES), range(len(self.blocks) if num_layers is None else num_layers)))

    def _key(self, cache: StagedCache, num_layers: int | None, places: Sequence[Place]) -> _Shape:
        assert cache.spans is not None
        attending = tuple(bool(pieces) for pieces in cache.spans.pieces)
        batch, width = cache.positions.shape
        return _Shape(num_layers, batch, width, attending, cache.duplicate is not None)

    def _call(self, listeners: Listeners, noted: Activations) -> None:
        """Calls the listeners of each place with a copy of its activation, whose memory the next pass overwrites."""
        for place, value in noted.items():
            for function in listeners.get(place, ()):
                function(value.clone())

    def _record(self, cache: StagedCache, forward: ModelForward, places: Sequence[Place]) -> tuple[Tape, Tensor]:
        """Runs the modules, and returns the tape of their operations, and the result."""
        product = None if self.operations is None else self.operations.compiled
        tape = Tape(self.blocks[: forward.num_layers], product, self.dtype, cache, forward.masks())
        try:
            if self.operations is not None:
                self.operations.tape = tape
            note = forward.noting(places, lambda place, value: tape.noted.update({place: value}))
            with self._silently(), note, tape.recording() as shown:
                out = forward.whole(shown)
        finally:
            if self.operations is not None:
                self.operations.tape = None
        return tape, out

    def _replay(self, recording: Tape, cache: StagedCache, forward: ModelForward, done: Done) -> Tensor:
        with self._silently(), recording.replaying(cache, forward.masks(), done):
            out = forward.outside(cache)
        return out if forward.num_layers is None else out.clone()  # the next pass overwrites a tape's memory
