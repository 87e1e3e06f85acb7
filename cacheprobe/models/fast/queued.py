"""Computes the operations of a forward on a CPU in loops that numba compiles, many in one call."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from cacheprobe.core.live import LiveModule
from cacheprobe.kvcache.staged import StagedCache
from cacheprobe.models.fast.operations import Affine, Operations, Rotation
from cacheprobe.models.hf.rms_norms import Norm, rms_norm_of
from cacheprobe.ops.attention.by_request import attend_by_request
from cacheprobe.ops.compiled.attention import serves
from cacheprobe.ops.compiled.product import CompiledProduct
from cacheprobe.ops.compiled.queue import Queue


class QueuedOperations(Operations):
    """Computes norms, products, rotations, gates, sums, cache writes and the attention of few tokens in compiled loops.
    Operations are queued, and computed when many are, before attention of many tokens and activations other than SiLU,
    which torch computes, and at the end.

    Twin: `Operations`, close: each result is rounded alike, but sums have another order.
    """

    def __init__(self, product: CompiledProduct, dtype: torch.dtype, most: int = 256) -> None:
        """dtype: of the model.  most: operations that can be queued."""
        super().__init__(product)
        self._queue = Queue(product.kind, dtype, most)
        self._calls: list[tuple[Callable[[Tensor], object], Tensor]] = []

    def begin(self) -> None:
        """Forgets what a forward that raised an error left in the queue."""
        self._queue.clear()
        self._calls.clear()

    def takes(self, values: Tensor) -> bool:
        """Returns True if the loops can compute with `values`: of the model's dtype, on the CPU, without gradients."""
        is_plain = values.dtype == self._queue.dtype and values.device.type == "cpu"
        return is_plain and not (torch.is_grad_enabled() and values.requires_grad)

    def silu(self, values: Tensor) -> Tensor:
        """Queues silu(values); returns the result."""
        return self._queue.silu(values)

    def products(self, values: Tensor, layers: Sequence[Affine]) -> list[Tensor]:
        """Queues linear layers that have the same input; returns their outputs [b, t, o]."""
        return [
            self._queue.product(values, layer.weight, layer.bias, follows=number == 0)
            for number, layer in enumerate(layers)
        ]

    def norm(self, values: Tensor, norm: Norm) -> Tensor:
        """Queues an RMSNorm; returns its result [..., m]."""
        return self._queue.norm(values, norm.weight, norm.eps)

    def rotated(self, q: Tensor, k: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Queues the rotary embedding of queries [b, t, h, d] and keys [b, t, g, d], in place; returns both."""
        cos, sin = (part.expand(*q.shape[:2], 1, q.shape[3]).contiguous() for part in rotation)
        return self._queue.rotate(q, cos, sin), self._queue.rotate(k, cos, sin, follows=False)

    def attended(self, cache: StagedCache, layer: int, heads: Sequence[Tensor], mask: Tensor, scale: float) -> Tensor:
        """Queues the cache write and the attention of passes that `attention.decode_attention` computes by request; for
        others, computes what is queued, and then as Operations.attended."""
        q, k, v = (part.transpose(1, 2) for part in heads)
        if cache.spans is None:
            self.finish()
            return super().attended(cache, layer, heads, mask, scale)
        if self._queue.is_long:
            self.finish()
        cached = partial(cache.row_view, layer)
        cache.store(layer, k, v, self._queue.store, lambda compare: self.pass_on(k, [lambda _: compare()]))
        if not serves(q):
            self.finish()
            return attend_by_request(q, cached, mask, cache.spans, scale)
        places = cache.spans.request_table(cached)
        out = self._queue.attend(q, *cached(int(places[0, 0]), 1), mask, places, scale)
        return out.transpose(1, 2).flatten(2)

    def gated(self, gate: Tensor, up: Tensor, activation: LiveModule) -> Tensor:
        """Queues silu(gate) * up; for another activation, computes what is queued and activation(gate) * up."""
        if is_silu(activation):
            return self._queue.gated(gate, up)
        self.finish()
        return super().gated(gate, up, activation)

    def added(self, stream: Tensor, value: Tensor) -> Tensor:
        """Queues stream + value; returns the result [b, t, m]."""
        return self._queue.added(stream, value)

    def pass_on(self, value: Tensor, functions: Sequence[Callable[[Tensor], object]]) -> None:
        """Keeps calls of functions with a result until it is computed."""
        self._calls += [(function, value) for function in functions]

    def finish(self) -> None:
        """Computes what is queued, and makes the calls of `pass_on`."""
        self._queue.run()
        calls, self._calls = self._calls, []
        for function, value in calls:
            function(value)


def is_silu(activation: LiveModule) -> bool:
    """Returns True if an activation module computes x / (1 + exp(-x))."""
    return isinstance(activation, nn.SiLU | SiLUActivation)


def replace_forward(module: LiveModule, operations: QueuedOperations) -> None:
    """Makes a module that is an RMSNorm or a SiLU compute with `operations`; others stay as they are. Inputs of another
    dtype, and those that need gradients, are computed by the module's own forward."""
    if rms_norm_of(module) is not None:
        vars(module)["forward"] = partial(_norm_by, operations, module, module.forward)
    elif is_silu(module):
        vars(module)["forward"] = partial(_silu_by, operations, module.forward)


def _norm_by(
    operations: QueuedOperations, module: LiveModule, own: Callable[[Tensor], Tensor], values: Tensor
) -> Tensor:
    norm = rms_norm_of(module)
    if norm is None or not operations.takes(values):
        return own(values)
    out = operations.norm(values.contiguous(), norm)
    operations.finish()
    return out


def _silu_by(operations: QueuedOperations, own: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    if not operations.takes(values):
        return own(values)
    out = operations.silu(values.contiguous())
    operations.finish()
    return out
