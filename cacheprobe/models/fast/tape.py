"""Records the operations of a model's blocks in one pass, and computes them again in later passes of the same shape,
without calling the model's modules.

In a pass of few tokens, modules take as long in Python as the arithmetic does. As in a CUDA graph, every tensor of the
recorded pass keeps its memory. A later pass copies its inputs there, and computes the same operations.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from weakref import ref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from cacheprobe.core.live import ModuleValue
from cacheprobe.kvcache.staged import StagedCache
from cacheprobe.models.fast.torch_operations import (
    NotTapedError,
    again,
    aten,
    is_map,
    queue_map,
    replaced,
    require_known_before,
    share_memory,
    tensors_in,
)
from cacheprobe.models.weights import Norm
from cacheprobe.ops.attention import AttentionSpans, attend_by_request
from cacheprobe.ops.compiled.attention import attention_call, require_slots, serves, store_call
from cacheprobe.ops.compiled.lanes import INNER_STEP
from cacheprobe.ops.compiled.operations import CompiledProduct
from cacheprobe.ops.compiled.queue import FixedQueue, Queue

_MOST_OPERATIONS = 128
"""Most operations of a block that can be queued."""

_OUT = 4
"""Place, in the numbers of an attention, of the address of the result."""

Place = tuple[str, int]
"""(site, layer); sites pre, S, T and C."""


def _of_none() -> None:
    """Stands for the reference to a cache that is gone."""


class RecordedCache(StagedCache):
    """Shows a staged cache to the modules of a pass that is recorded: a tape writes the keys and values."""

    def __init__(self, cache: StagedCache, tape: "Tape") -> None:
        vars(self).update(vars(cache))
        self.tape = tape

    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Records the cache write; returns keys and values by which `Tape.attend` knows the layer."""
        return self.tape.write(layer, k, v)


class Tape(TorchDispatchMode):
    """Holds the operations of a model's blocks in passes of one shape, and computes them.

    Products, norms, activations, sums and attention that compiled loops compute are queued; what torch computes between
    two of them ends a queue. Twin: the modules themselves, bitwise; `Tapes` compares both before it trusts a tape.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        product: CompiledProduct | None,
        dtype: torch.dtype,
        cache: StagedCache,
        masks: Sequence[Tensor],
    ) -> None:
        """blocks: those that the pass computes.  product: of the model's operations, None for torch's.  dtype: of the
        model.  cache, masks: of the pass that is recorded."""
        super().__init__()
        self.blocks, self.noted = blocks, dict[Place, Tensor]()
        """noted: activations of the last pass."""
        self.is_recording = False
        """Whether a block's own forward runs, which is recorded."""
        self.num_bytes = 0
        """Memory of all results."""
        self._queue = None if product is None else Queue(product.kind, dtype, _MOST_OPERATIONS * len(blocks))
        self._steps: list[Callable[[], object]] = []
        self._inputs: dict[int, list[tuple[int, Tensor]]] = {}
        """Block -> (number among the tensors that it is given, memory) of each tensor that no block before had."""
        self._known: dict[int, tuple[Tensor, Tensor]] = {}
        """id of an input of a block -> (the input, its memory)."""
        self._stream, self._rest, self._is_tuple = torch.empty(0), tuple[object, ...](), False
        self._held: list[tuple[int, Tensor, Tensor]] = []
        """(layer, new keys, new values) of each cache write."""
        self._layer_of: dict[int, tuple[int, tuple[Tensor, Tensor]]] = {}
        """id of the keys that a cache write returned -> (layer, these keys and values)."""
        self._biases: list[tuple[Tensor, Tensor]] = []
        """(bias of the model, float32 copy that the loops read)"""
        self._places: dict[tuple[int, ...], tuple[int, NDArray[np.int64]]] = {}
        """Strides of keys and values -> (a layer that has them, its table of requests for the loops)."""
        self._calls: list[tuple[NDArray[np.int64], Callable[[StagedCache], NDArray[np.int64]]]] = []
        """(numbers that describe a cache write or an attention to the loops, function that makes them for a cache)."""
        self._rows, self._starts = (torch.empty(len(cache.rows), dtype=torch.int64) for _ in range(2))
        self._masks = [mask.new_empty(*mask.shape[:3], cache.cache.capacity) for mask in masks]
        self._mask_of = {mask.data_ptr(): number for number, mask in enumerate(masks)}
        self._bound: Callable[[], object] = ref(cache.cache)
        """The cache whose addresses the calls hold. It may be gone: a tape outlives the runs that use it."""
        self._take_pass(cache, masks)

    # -- recording

    @contextmanager
    def recording(self) -> Iterator[RecordedCache]:
        """Records the blocks of the forward inside the `with`, which must use the cache that this gives. Raises:
        NotTapedError where the operations cannot be computed again."""
        with ExitStack() as stack:
            for number, block in enumerate(self.blocks):
                forward = partial(self._record_block, number, block.forward)
                stack.enter_context(replaced(block, forward))
            yield RecordedCache(self._pass, self)
        self._layer_of.clear()
        self._known.clear()
        self._held_pass = None

    def _record_block(
        self, number: int, own: Callable[..., ModuleValue], *args: ModuleValue, **kwargs: ModuleValue
    ) -> ModuleValue:
        given = tensors_in(args, kwargs)
        if number and given[0] is not self._stream:
            raise NotTapedError("a block is not given what the block before returned")

        def kept(tensor: Tensor) -> Tensor:
            """Returns the memory of an input: a copy, since the model may own the tensor."""
            if tensor.data_ptr() in self._mask_of or (number and tensor is self._stream):
                return tensor
            if id(tensor) not in self._known:
                self._known[id(tensor)] = tensor, tensor.clone()
                place = next(place for place, one in enumerate(given) if one is tensor)
                self._inputs.setdefault(number, []).append((place, self._known[id(tensor)][1]))
            return self._known[id(tensor)][1]

        args, kwargs = tree_map_only(Tensor, kept, (args, kwargs))
        if number == 0 and self.noted.get(("pre", 0)) is given[0]:
            self.noted["pre", 0] = kept(given[0])
        self.is_recording = True
        try:
            with self:
                out = own(*args, **kwargs)
        finally:
            self.is_recording = False
        self._stream, self._rest = (out, ()) if isinstance(out, Tensor) else (out[0], tuple(out[1:]))
        if any(isinstance(one, Tensor) for one in tree_leaves(self._rest)):
            raise NotTapedError("a block returns several tensors")
        self._is_tuple = not isinstance(out, Tensor)
        if number == len(self.blocks) - 1:
            self._close()  # what comes after the blocks reads values
        return out

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[ModuleValue, ...] = (),
        kwargs: dict[str, ModuleValue] | None = None,
    ) -> ModuleValue:
        """Computes an operation of torch, and records it; views are not recorded, since memory stays where it is."""
        kwargs = kwargs or {}
        if func is aten.dropout.default and not args[2]:
            return args[0]
        require_known_before(func)
        if func.is_view:
            out = func(*args, **kwargs)
            if not isinstance(out, Tensor) or share_memory(out, args[0]):
                return out
        if self._queue is not None and not kwargs and is_map(self._queue, func, args):
            return self._counted(queue_map(self._queue, func, args))
        self._close()
        out = func(*args, **kwargs)
        self.num_bytes += sum(one.nbytes for one in tree_leaves(out) if isinstance(one, Tensor))
        self._steps.append(again(func, args, kwargs, out))
        return out

    def product(self, values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Queues values weight^T + bias; returns the result [..., o], which holds no values yet."""
        with self._to_queue() as queue:
            if values.shape[-1] % INNER_STEP[queue.kind] or not weight.is_contiguous():
                self._close()
                compute = partial(CompiledProduct(queue.kind), values, weight, bias)
                out = compute()
                self._steps.append(lambda: out.copy_(compute()))
                return out
            if bias is not None and bias.dtype != torch.float32:
                self._biases.append((bias, bias.float().clone()))
                bias = self._biases[-1][1]
            return self._counted(queue.product(values, weight, bias))

    def norm(self, values: Tensor, norm: Norm) -> Tensor:
        """Queues an RMSNorm; returns the result [..., m], which holds no values yet."""
        with self._to_queue() as queue:
            return self._counted(queue.norm(values, *norm))

    def silu(self, values: Tensor) -> Tensor:
        """Queues silu(values); returns the result, which holds no values yet."""
        with self._to_queue() as queue:
            return self._counted(queue.silu(values))

    def _counted(self, out: Tensor) -> Tensor:
        self.num_bytes += out.nbytes
        return out

    @contextmanager
    def _to_queue(self) -> Iterator[Queue]:
        """Gives the queue, and records nothing inside the `with`."""
        assert self._queue is not None
        with _disable_current_modes():
            yield self._queue

    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Records a cache write; see RecordedCache.write."""
        cache = self._pass
        keys, values = cache.keys[layer], cache.values[layer]
        with _disable_current_modes():
            self._held.append((layer, k, v))
            if self._queue is not None and k.stride(3) == v.stride(3) == 1:
                self._queue.store(k, v, keys, values, self._rows, self._starts)
                self._calls.append((self._queue.described[-1], partial(self._store_call, layer, k, v)))
            else:
                self._close()
                cache.store(layer, k, v)
                self._steps.append(lambda: self._pass.store(layer, k, v))
            marks = keys[:1], values[:1]
        self._layer_of[id(marks[0])] = layer, marks
        return marks

    def attend(
        self,
        q: Tensor,
        held: tuple[Tensor, Tensor],
        mask: Tensor,
        scale: float | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Records the attention of queries [b, h, t, d]; returns the outputs [b, t, h * d].

        held: what `write` returned for the layer.  The rest is as in `ops.attention.attend_by_request`."""
        layer, marks = self._layer_of.pop(id(held[0]), (None, None))
        number = self._mask_of.get(mask.data_ptr())
        if marks is None or held[1] is not marks[1] or layer is None or number is None or mask.shape[1] > 1:
            raise NotTapedError("an attention is not over a layer's keys and a mask of the pass")
        factor = q.shape[-1] ** -0.5 if scale is None else scale
        with _disable_current_modes():
            if self._queue is not None and sinks is None and serves(q) and q.stride(-1) == 1:
                strides = (*held[0].stride(), *held[1].stride())
                _, places = self._places.setdefault(strides, (layer, self._table(layer)))
                out = self._queue.attend(q, *held, self._masks[number], places, factor, softcap)
                call = self._queue.described[-1]
                make = partial(self._attention_call, layer, q, number, (factor, softcap), places, int(call[_OUT]))
                self._calls.append((call, make))
                return out.transpose(1, 2).flatten(2)
            self._close()
            compute = partial(self._attend_by_torch, layer, q, number, factor, softcap, sinks)
            out = compute()
            self._steps.append(lambda: out.copy_(compute()))
            return out

    def _attend_by_torch(
        self, layer: int, q: Tensor, number: int, scale: float, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        cached, mask = partial(self._pass.row_view, layer), self._given_masks[number]
        return attend_by_request(q, cached, mask, self._spans, scale, softcap, sinks)

    def _close(self) -> None:
        """Computes what is queued, and makes a step of it."""
        if self._queue:
            queued = FixedQueue(self._queue, [*self._pass.keys, *self._pass.values])
            queued.run()
            self._steps.append(queued.run)

    # -- computing again

    @contextmanager
    def replaying(
        self, cache: StagedCache, masks: Sequence[Tensor], done: Callable[[Mapping[Place, Tensor]], None]
    ) -> Iterator[None]:
        """Makes the blocks compute by this tape in the forward inside the `with`. done: is called with the activations
        of all places, which the next pass overwrites. Raises: NotTapedError for inputs of other shapes."""
        with ExitStack() as stack:
            last = len(self.blocks) - 1
            for number, block in enumerate(self.blocks):
                forward = partial(self._replay_block, number, (cache, masks, done) if number == last else None)
                stack.enter_context(replaced(block, forward))
            yield

    def _replay_block(
        self, number: int, last: "tuple | None", *args: ModuleValue, **kwargs: ModuleValue
    ) -> ModuleValue:
        if number in self._inputs:
            given = tensors_in(args, kwargs)
            for place, kept in self._inputs[number]:
                if given[place].shape != kept.shape:
                    raise NotTapedError("a pass has inputs of other shapes")
                kept.copy_(given[place])
        stream = args[0] if args else kwargs["hidden_states"]
        if last is not None:
            cache, masks, done = last
            self._compute(cache, masks)
            done(self.noted)
            stream = self._stream
        return (stream, *self._rest) if self._is_tuple else stream

    def _compute(self, cache: StagedCache, masks: Sequence[Tensor]) -> None:
        """Computes all operations on what was copied into the memory of the inputs."""
        try:
            self._compute_pass(cache, masks)
        finally:
            self._held_pass = None

    def _compute_pass(self, cache: StagedCache, masks: Sequence[Tensor]) -> None:
        self._take_pass(cache, masks)
        for layer, places in self._places.values():
            places[:] = self._table(layer)
            require_slots(places, masks[0].shape[3])
        if self._bound() is not cache.cache:
            for call, make in self._calls:
                call[:] = make(cache)
            self._bound = ref(cache.cache)
        for own, wide in self._biases:
            wide.copy_(own)
        for step in self._steps:
            step()
        if cache.duplicate is not None and self._queue is not None:
            for layer, k, v in self._held:
                cache.store(layer, k, v, lambda *_: None)  # the loops wrote these keys and values

    @property
    def _pass(self) -> StagedCache:
        """The staged cache of the pass that is recorded or computed, which is not kept any longer."""
        assert self._held_pass is not None
        return self._held_pass

    def _take_pass(self, cache: StagedCache, masks: Sequence[Tensor]) -> None:
        """Keeps what the operations read of a pass beside the inputs of blocks: slots, positions and masks."""
        assert cache.spans is not None
        self._held_pass, placed = cache, cache.placed(torch.device("cpu"))
        self._rows.copy_(placed.written_rows)
        self._starts.copy_(placed.starts)
        # not the pass's own: it keeps tables of the keys that modules see, which may be copies
        self._spans = AttentionSpans(cache.spans.pieces, cache.spans.is_without_pads)
        self._given_masks = masks
        capacity = self._pass.cache.capacity
        if self._masks[0].shape[3] != capacity:
            self._masks = [mask.new_empty(*mask.shape[:3], capacity) for mask in self._masks]
            self._bound = _of_none
        for kept, mask in zip(self._masks, masks, strict=True):
            kept[..., : mask.shape[3]] = mask

    def _table(self, layer: int) -> NDArray[np.int64]:
        """Returns the table of `AttentionSpans.request_table`, relative to cache row 0 of a layer."""
        cached = partial(self._pass.row_view, layer)
        places = self._spans.request_table(cached).copy()
        held = self._pass.keys[layer], self._pass.values[layer]
        for column, part, whole in zip((1, 2), cached(int(places[0, 0]), 1), held, strict=True):
            places[:, column] += (part.data_ptr() - whole.data_ptr()) // part.element_size()
        return places

    def _attention_call(
        self,
        layer: int,
        q: Tensor,
        number: int,
        scale: tuple[float, float | None],
        places: NDArray[np.int64],
        out: int,
        cache: StagedCache,
    ) -> NDArray[np.int64]:
        """Returns the numbers that describe an attention over a cache. scale: and soft cap.  out: address of the
        result."""
        held = cache.keys[layer][:1], cache.values[layer][:1]
        call, _ = attention_call(q, *held, self._masks[number], places, *scale)
        call[_OUT] = out
        return call

    def _store_call(self, layer: int, k: Tensor, v: Tensor, cache: StagedCache) -> NDArray[np.int64]:
        return store_call(k, v, cache.keys[layer], cache.values[layer], self._rows, self._starts)
