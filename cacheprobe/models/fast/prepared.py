"""Computes the blocks of passes whose shape occurs again and again, from operations that were prepared once.

In a pass of few tokens, Python takes as long to queue the operations of all blocks as the loops take to compute them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cacheprobe.core.live import LiveModule
from cacheprobe.kvcache.cache import KVCache
from cacheprobe.kvcache.staged import StagedCache
from cacheprobe.models.fast.operations import Affine, BlockForward, PassInputs, QueuedOperations, is_silu
from cacheprobe.models.weights import Norm
from cacheprobe.ops.compiled.attention import require_slots, serves
from cacheprobe.ops.compiled.lanes import INNER_STEP
from cacheprobe.ops.compiled.operations import CompiledProduct
from cacheprobe.ops.compiled.queue import PreparedQueue

_MOST_TOKENS = 256
"""Largest number of tokens in a pass that is prepared: in longer ones, the loops take far longer than Python does."""

_MOST_SHAPES = 8
"""Shapes of passes that are kept for one cache; the one that was not used for longest is dropped for another."""


_MOST_OPERATIONS = 32
"""Most operations of a block."""


class NotPreparedError(Exception):
    """Is raised while a pass is prepared, if torch must compute a part of it."""


class _Shape(NamedTuple):
    """Holds what passes over one cache have in common if they share their operations."""

    batch: int
    width: int
    num_layers: int
    attending: bytes
    """Batch indices whose attention is computed."""
    has_duplicate: bool
    """Whether a batch index recomputes the tokens of another one."""


class PreparedOperations(QueuedOperations):
    """Computes the blocks in passes of few tokens by operations that are queued once for each shape and cache, when the
    shape occurs for the second time. The operations of other passes are queued in each pass, as by QueuedOperations.

    Twin: `QueuedOperations`, bitwise: tests.models.test_prepared_passes.
    """

    def __init__(self, product: CompiledProduct, dtype: torch.dtype) -> None:
        """dtype: of the model."""
        super().__init__(product, dtype)
        self._compiled, self._can_prepare = product, True  # until torch had to compute a part of a pass
        self._by_cache: WeakKeyDictionary[
            BlockForward, WeakKeyDictionary[KVCache, dict[_Shape, _PreparedPass | None]]
        ] = WeakKeyDictionary()
        """None for a shape that occurred once."""

    def run_blocks(self, model: BlockForward, inputs: PassInputs) -> Tensor:
        """Returns the residual stream [b, t, m] after the blocks of a model. The operations of the first pass of a
        shape are queued; the second one prepares them, and later ones run what is prepared. The shape that was not used
        for longest is dropped."""
        cache, (batch, width) = inputs.cache, inputs.stream.shape[:2]
        spans = cache.spans
        if spans is None or not self._can_prepare or not _is_preparable(inputs):
            return super().run_blocks(model, inputs)
        table = spans.request_table(partial(cache.row_view, 0))
        attending, has_duplicate = table[:, 0].tobytes(), cache.duplicate is not None
        num_layers = len(cache.keys) if inputs.num_layers is None else inputs.num_layers
        shape = _Shape(batch, width, num_layers, attending, has_duplicate)
        by_shape = self._by_cache.setdefault(model, WeakKeyDictionary()).setdefault(cache.cache, {})
        is_new, prepared = shape not in by_shape, by_shape.pop(shape, None)
        if prepared is not None and not prepared.is_current:
            by_shape.clear()
            is_new, prepared = True, None
        if len(by_shape) == _MOST_SHAPES:
            del by_shape[next(iter(by_shape))]
        by_shape[shape] = prepared  # the last one used
        if is_new:  # the shapes of prompts often occur once
            return super().run_blocks(model, inputs)
        if prepared is None:
            try:
                prepared = _PreparedPass(model, _Preparing(self._compiled, self._queue.dtype, inputs, table), inputs)
            except NotPreparedError:
                self._can_prepare = False
                return super().run_blocks(model, inputs)
            by_shape[shape] = prepared
        return prepared.run(inputs, table)


def _is_preparable(inputs: PassInputs) -> bool:
    """Returns True if the loops compute attention in this pass, and it is short enough to be prepared."""
    stream = inputs.stream
    is_short = stream.shape[0] * stream.shape[1] <= _MOST_TOKENS and serves(stream[:, None])
    return is_short and inputs.num_layers != 0 and type(inputs.cache.cache) is KVCache


class _Preparing(QueuedOperations):
    """Queues the operations of all blocks, on memory that belongs to a prepared pass."""

    def __init__(
        self, product: CompiledProduct, dtype: torch.dtype, inputs: PassInputs, table: NDArray[np.int64]
    ) -> None:
        cache, stream = inputs.cache, inputs.stream
        super().__init__(product, dtype, _MOST_OPERATIONS * len(cache.keys))
        if inputs.rotation is None:
            raise NotPreparedError
        self.queue = self._queue
        self.steps = cache.keys[0].stride(), cache.values[0].stride()
        batch, width = stream.shape[:2]
        masks = {"": inputs.masks} if isinstance(inputs.masks, Tensor) else inputs.masks
        self.masks = {kind: mask.new_empty(batch, 1, width, cache.cache.capacity) for kind, mask in masks.items()}
        self.rotation = tuple(part.new_empty(batch, width, *part.shape[2:]) for part in inputs.rotation)
        self.rows, self.starts = torch.empty(batch, dtype=torch.int64), torch.empty(batch, dtype=torch.int64)
        self.places = table.copy()
        self.weights: list[Tensor] = []
        self.biases: list[tuple[Tensor, Tensor]] = []
        """(bias of the model, float32 copy that the loops read)"""
        self.compared: list[tuple[Tensor, Tensor]] = []
        """New keys and values of each layer, if a batch index recomputes the tokens of another one."""

    def products(self, values: Tensor, layers: Sequence[Affine]) -> list[Tensor]:
        """Queues linear layers that have the same input; returns their outputs [b, t, o]."""
        if values.shape[-1] % INNER_STEP[self.queue.kind]:
            raise NotPreparedError
        self.weights += [layer.weight for layer in layers]
        return super().products(values, [Affine(layer.weight, self._bias(layer.bias)) for layer in layers])

    def _bias(self, bias: Tensor | None) -> Tensor | None:
        if bias is None:
            return None
        self.biases.append((bias, bias.float().clone()))
        return self.biases[-1][1]

    def norm(self, values: Tensor, norm: Norm) -> Tensor:
        """Queues an RMSNorm; returns its result [..., m]."""
        self.weights.append(norm.weight)
        return super().norm(values, norm)

    def attended(self, cache: StagedCache, layer: int, heads: Sequence[Tensor], mask: Tensor, scale: float) -> Tensor:
        """Queues the cache write and the attention."""
        q, k, v = (part.transpose(1, 2) for part in heads)
        keys, values = cache.keys[layer], cache.values[layer]
        if (keys.stride(), values.stride()) != self.steps:
            raise NotPreparedError
        if cache.duplicate is not None:
            self.compared.append((k, v))
        self.queue.store(k, v, keys, values, self.rows, self.starts)
        out = self.queue.attend(q, keys[:1], values[:1], mask, self.places, scale)
        return out.transpose(1, 2).flatten(2)

    def gated(self, gate: Tensor, up: Tensor, activation: LiveModule) -> Tensor:
        """Queues silu(gate) * up. Raises: NotPreparedError for another activation."""
        if not is_silu(activation):
            raise NotPreparedError
        return super().gated(gate, up, activation)

    def pass_on(self, value: Tensor, functions: Sequence[Callable[[Tensor], object]]) -> None:
        """Calls the functions at once: they note which tensor is which activation."""
        for function in functions:
            function(value)


class _PreparedPass:
    """Holds the queued operations of all blocks for passes of one shape over one cache, and runs them in each such
    pass. Keeps the tensors of the cache alive."""

    def __init__(self, model: BlockForward, operations: _Preparing, inputs: PassInputs) -> None:
        """Prepares passes that have the shapes of `inputs`. Raises: NotPreparedError if torch computes a part."""
        self._operations = operations
        noted: list[tuple[tuple[str, int], Tensor]] = []

        def note(place: tuple[str, int]) -> Callable[[Tensor], None]:
            """Returns a function that notes the activation of a place."""
            return lambda value: noted.append((place, value))

        stream = torch.empty_like(inputs.stream)
        layers = range(len(inputs.cache.keys))
        masks = operations.masks[""] if isinstance(inputs.masks, Tensor) else operations.masks
        listeners = {(site, layer): [note((site, layer))] for site in ("pre", "T", "C", "S") for layer in layers}
        rotation = (operations.rotation[0], operations.rotation[1])
        model.blocks(operations, inputs._replace(stream=stream, rotation=rotation, masks=masks, listeners=listeners))
        fresh = {tensor.data_ptr(): tensor for tensor in (stream, *(tensor for _, tensor in noted))}
        index = {address: number for number, address in enumerate(fresh)}
        self._noted = [(place, index[tensor.data_ptr()]) for place, tensor in noted]
        fixed = [tensor for pair in operations.compared for tensor in pair]
        self._addresses = [weight.data_ptr() for weight in operations.weights]
        self._queue = PreparedQueue(operations.queue, [*fresh.values()], fixed)

    @property
    def is_current(self) -> bool:
        """False if a weight lies elsewhere than when the pass was prepared."""
        return [weight.data_ptr() for weight in self._operations.weights] == self._addresses

    def run(self, inputs: PassInputs, table: NDArray[np.int64]) -> Tensor:
        """Returns the residual stream [b, t, m] after the blocks. table: `AttentionSpans.request_table` of the pass.

        Raises: ValueError if a request attends to more slots than its mask has, or to none of its own.
        """
        own, cache, stream = self._operations, inputs.cache, inputs.stream
        for kind, kept in own.masks.items():
            mask = inputs.mask(kind)
            require_slots(table, mask.shape[3])
            kept[..., : mask.shape[3]] = mask
        placed = cache.placed(stream.device)
        for new, kept in (
            *zip(inputs.rotation or (), own.rotation, strict=True),
            *own.biases,
            (placed.written_rows, own.rows),
            (placed.starts, own.starts),
        ):
            kept.copy_(new)
        own.places[:] = table
        first_row = cache.row_view(0, int(table[0, 0]), 1)
        for column, part, held in zip((1, 2), first_row, (cache.keys[0], cache.values[0]), strict=True):
            own.places[:, column] += (part.data_ptr() - held.data_ptr()) // held.element_size()
        states = self._queue.run(stream).unbind()
        for layer, (k, v) in enumerate(own.compared):
            cache.store(layer, k, v, lambda *_: None)  # the loops wrote these keys and values
        for place, number in self._noted:
            for function in inputs.listeners.get(place, ()):
                function(states[number])
        last = states[self._noted[-1][1]]
        return last if inputs.num_layers is None else last.clone()  # a view would keep the states of all layers
