"""Captures passes of a transformers model on a GPU as CUDA graphs, each of which is launched as one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor

from cacheprobe.core.devices import joined, parts_of
from cacheprobe.kvcache.cache import KVCache
from cacheprobe.kvcache.staged import Placed, StagedCache
from cacheprobe.models.fast.operations import Listeners
from cacheprobe.models.fast.repeated import MOST_WIDTH, Activations, Done, ModelForward, RepeatedPasses
from cacheprobe.models.fast.tape import Place


class CapturedCache(StagedCache):
    """Shows a staged cache to the forward that is captured: its tokens, rows and positions are in memory of their own,
    to which later passes copy theirs. Nothing that the host knows of a single pass is left."""

    def __init__(self, cache: StagedCache, device: torch.device) -> None:
        vars(self).update(vars(cache))
        placed = cache.placed(device)
        self.fed = joined(placed)
        """Numbers of all tensors of a Placed."""
        self._placed, self._run, self.spans = {device: Placed(*parts_of(self.fed, placed))}, None, None


class _GraphShape(NamedTuple):
    """Holds what passes have in common if they share a graph, which holds the addresses of a cache."""

    cache: int
    """The id of the KVCache."""
    num_layers: int | None
    """Number of blocks that are computed; None for all."""
    batch: int
    width: int
    span: int
    """Number of slots of the masks."""
    places: tuple[Place, ...]
    """Places whose activations are noted."""


@dataclass
class Graph:
    """Holds a captured pass. Its tensors keep their memory."""

    launched: torch.cuda.CUDAGraph
    fed: Tensor
    """As `CapturedCache.fed`."""
    places: tuple[Place, ...]
    states: Tensor
    """[places, b, t, m]"""
    out: Tensor

    @property
    def noted(self) -> Mapping[Place, Tensor]:
        """Activations of the last pass."""
        return dict(zip(self.places, self.states, strict=True))

    @property
    def num_bytes(self) -> int:
        """Memory of the results."""
        return self.states.nbytes + self.out.nbytes


class Graphs(RepeatedPasses[Graph]):
    """Keeps the CUDA graphs of one model, which is on one device, where kernels compute the attention.

    Twin: the modules, bitwise: tests.device.test_graphs.
    """

    most_bytes, most_shapes = 2**31, 32

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self._stream = device, torch.cuda.Stream(device)
        self._caches: dict[int, ref[KVCache]] = {}
        """The caches of all graphs by their ids, which other caches may have later."""

    def __deepcopy__(self, memo: dict[int, object]) -> "Graphs":
        """Returns Graphs without any graph: graphs hold addresses."""
        return Graphs(self.device)

    def takes(self, cache: StagedCache, logit_slots: Sequence[int] | None) -> bool:
        """Returns True if passes of this kind may be captured: few tokens of each request, none computed twice, and no
        hidden slots, which the host uploads."""
        is_plain = type(cache.cache) is KVCache and cache.duplicate is None and logit_slots is None
        is_plain &= cache.cache.writer is not None  # without the kernel, the host writes rows one by one
        is_short = cache.positions.shape[1] <= MOST_WIDTH
        return not self.refusal and is_plain and is_short and not cache.cache.hides_slots(cache.rows)

    def _places(self, num_layers: int | None, listeners: Listeners) -> Sequence[Place]:
        """Returns the places with listeners."""
        return [place for place in listeners if num_layers is None or place[1] < num_layers]

    def _key(self, cache: StagedCache, num_layers: int | None, places: Sequence[Place]) -> _GraphShape:
        span = 0 if cache.is_read_in_place else cache.span
        batch, width = cache.positions.shape
        number = id(cache.cache)
        if number not in self._caches:
            self._caches[number] = ref(cache.cache, partial(self._forget_cache, number))
        return _GraphShape(number, num_layers, batch, width, span, tuple(places))

    def _forget_cache(self, number: int, gone: "ref[KVCache]") -> None:
        del self._caches[number]
        for key in [key for key in self._shapes if isinstance(key, _GraphShape) and key.cache == number]:
            self._drop(key)

    def _call(self, listeners: Listeners, noted: Activations) -> None:
        for place, value in noted.items():
            for function in listeners.get(place, ()):
                function(value)

    def _record(self, cache: StagedCache, forward: ModelForward, places: Sequence[Place]) -> tuple[Graph, Tensor]:
        """Captures the modules' pass, and launches it."""
        shown, graph, noted = CapturedCache(cache, self.device), torch.cuda.CUDAGraph(), dict[Place, Tensor]()
        pool = next((one.launched.pool() for one in self._shapes.values() if one is not None), None)
        note = forward.noting(places, lambda place, value: noted.update({place: value}))
        # the outer `with` of the stream ends also where the end of the capture fails
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream), self._silently(), note:
            with torch.cuda.graph(graph, pool, self._stream, capture_error_mode="thread_local"):
                out = forward.whole(shown)
                states = torch.stack(list(noted.values())) if places else out[:0]
        captured = Graph(graph, shown.fed, tuple(noted), states, out)
        return captured, self._replay(captured, cache, forward, lambda noted: None)

    def _replay(self, recording: Graph, cache: StagedCache, forward: ModelForward, done: Done) -> Tensor:
        """Launches a graph on what the pass feeds. Its results are copied, since the next launch overwrites them."""
        joined(cache.placed(self.device), out=recording.fed)
        recording.launched.replay()
        done(dict(zip(recording.places, recording.states.clone(), strict=True)))
        return recording.out.clone()
