"""Defines the operations of which a forward consists, computed by torch, by compiled loops, or by Triton kernels."""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.activations import SiLUActivation

from cacheprobe.core.live import LiveConfig, LiveModule
from cacheprobe.kvcache.staged import StagedCache
from cacheprobe.models.hf.attention import attend_over_cache
from cacheprobe.models.hf.masks import sliding_window, text_config
from cacheprobe.models.weights import Norm, is_conv, rms_norm_of
from cacheprobe.ops.attention import attend_by_request
from cacheprobe.ops.compiled.attention import serves
from cacheprobe.ops.compiled.operations import CompiledProduct
from cacheprobe.ops.compiled.queue import Queue
from cacheprobe.ops.kernel_set import KernelSet

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Function (values, weight, bias) -> values weight^T + bias."""

Rotation = tuple[Tensor, Tensor]
"""(cosines, sines) by which queries and keys are rotated at their positions, [b, t, 1, d] each; the first half of each
vector of sines is negated."""


Listeners = Mapping[tuple[str, int], Sequence[Callable[[Tensor], object]]]
"""Functions to call with an activation, keyed by (site, layer); sites are pre, S, T and C."""

Masks = Tensor | Mapping[str, Tensor]
"""Additive mask [b, 1, t, s], or one for each kind of layer."""


class Affine(NamedTuple):
    """Holds the tensors of a linear layer."""

    weight: Tensor
    bias: Tensor | None


class PassInputs(NamedTuple):
    """Holds what the blocks of a model read in one forward."""

    stream: Tensor
    """Residual stream [b, t, m] before the first block."""
    cache: StagedCache
    """Where the blocks write and read keys and values, with staged positions."""
    rotation: Rotation | None
    masks: Masks
    listeners: Listeners
    num_layers: int | None
    """How many blocks to compute; None for all."""

    def mask(self, kind: str) -> Tensor:
        """Returns the mask of a kind of layer."""
        return self.masks if isinstance(self.masks, Tensor) else self.masks[kind]


@runtime_checkable
class BlockForward(Protocol):
    """Is the part of a forward that computes the blocks (a Protocol)."""

    def blocks(self, operations: "Operations", inputs: PassInputs) -> Tensor:
        """Returns the residual stream [b, t, m] after the blocks. Writes keys and values to the cache, and passes
        activations on to the listeners."""
        ...


class Operations:
    """Computes the operations of a forward by torch, each at once. `product` may be replaced.

    Twin: the model's own modules, bitwise, if the modules compute with the same product.
    """

    def __init__(self, product: Product = linear) -> None:
        self.product = product

    def begin(self) -> None:
        """Starts a forward. Here nothing is kept from forward to forward."""

    def takes(self, values: Tensor) -> bool:
        """Returns True if `norm` can compute with `values`; here with all."""
        return True

    def run_blocks(self, model: BlockForward, inputs: PassInputs) -> Tensor:
        """Returns the residual stream [b, t, m] after the blocks of a model."""
        return model.blocks(self, inputs)

    def products(self, values: Float[Tensor, "b t i"], layers: Sequence[Affine]) -> list[Tensor]:
        """Returns the outputs [b, t, o] of linear layers that have the same input."""
        return [self.product(values, *layer) for layer in layers]

    def norm(self, values: Tensor, norm: Norm) -> Tensor:
        """Returns the RMSNorm of `values` [..., m], in the dtype of `values`."""
        wide = values if values.dtype == torch.float64 else values.float()
        scale = wide.pow(2).mean(-1, keepdim=True).add_(norm.eps).rsqrt_()
        scaled = wide.mul_(scale) if wide is not values else wide * scale
        return norm.weight * scaled.to(values.dtype)

    def rotated(
        self, q: Float[Tensor, "b t h d"], k: Float[Tensor, "b t g d"], rotation: Rotation
    ) -> tuple[Tensor, Tensor]:
        """Returns queries [b, t, h, d] and keys [b, t, g, d] after the rotary embedding."""
        cos, sin = rotation
        both = torch.cat((q, k), 2)
        first, second = both.chunk(2, -1)
        rotated = (both * cos).add_(torch.cat((second, first), -1).mul_(sin))
        rotated_q, rotated_k = rotated.split((q.shape[2], k.shape[2]), 2)
        return rotated_q, rotated_k

    def attended(
        self, cache: StagedCache, layer: int, heads: Sequence[Tensor], mask: Tensor, scale: float
    ) -> Float[Tensor, "b t w"]:
        """Stores keys and values at the positions of `cache`, and returns the attention outputs [b, t, h * d].
        heads: new queries [b, t, h, d], keys and values [b, t, g, d]."""
        q, k, v = (part.transpose(1, 2) for part in heads)
        return attend_over_cache(cache, layer, q, k, v, mask, scale)

    def gated(self, gate: Tensor, up: Tensor, activation: LiveModule) -> Tensor:
        """Returns activation(gate) * up, [b, t, o]."""
        return activation(gate) * up

    def added(self, stream: Tensor, value: Tensor) -> Tensor:
        """Returns stream + value, [b, t, m]."""
        return stream + value

    def pass_on(self, value: Tensor, functions: Sequence[Callable[[Tensor], object]]) -> None:
        """Calls functions with a result, as soon as it is computed. The functions must not change the result."""
        for function in functions:
            function(value)

    def finish(self) -> None:
        """Computes what is not computed yet, and makes the calls of `pass_on`. Here each operation is computed at
        once."""


class QueuedOperations(Operations):
    """Computes norms, products, rotations, gates, sums, cache writes and the attention of few tokens in compiled loops.
    Operations wait in a queue, which is computed at `finish`, at an attention if the queue is long, and before what
    torch computes: the attention of many tokens, and activations other than SiLU.

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
        return is_plain and not _needs_gradient(values)

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


def replace_forward(module: LiveModule, product: Product | None, operations: Operations | None) -> None:
    """Makes a module compute with other operations, or again by its own forward if there are none: a linear layer with
    `product`; an RMSNorm, or a SiLU that the loops compute, with `operations`. Other modules stay as they are, and
    inputs that need a gradient, or that `operations` does not take, are computed by the module's own forward."""
    if _is_replaced(module):
        del vars(module)["forward"]
    if product is not None and (type(module) is nn.Linear or is_conv(module)):
        vars(module)["forward"] = partial(_linear_by, product, module, module.forward)
    elif operations is not None and rms_norm_of(module) is not None:
        vars(module)["forward"] = partial(_norm_by, operations, module, module.forward)
    elif is_silu(module) and isinstance(operations, QueuedOperations):
        vars(module)["forward"] = partial(_silu_by, operations, module.forward)


def without_operations(module: LiveModule) -> LiveModule:
    """Returns a module with the same parameters whose forward is its class's own, if `replace_forward` replaced it;
    another module unchanged."""
    if not _is_replaced(module):
        return module
    own = copy.copy(module)
    del vars(own)["forward"]
    return own


def _is_replaced(module: LiveModule) -> bool:
    return getattr(vars(module).get("forward"), "func", None) in (_linear_by, _norm_by, _silu_by)


def affine(module: LiveModule) -> Affine:
    """Returns the present tensors of a linear layer."""
    return Affine(module.weight.T if is_conv(module) else module.weight, module.bias)


def _linear_by(product: Product, module: LiveModule, own: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    return own(values) if _needs_gradient(values) else product(values, *affine(module))


def _needs_gradient(values: Tensor) -> bool:
    return torch.is_grad_enabled() and values.requires_grad


def _norm_by(operations: Operations, module: LiveModule, own: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    norm = rms_norm_of(module)
    if norm is None or _needs_gradient(values) or not operations.takes(values):
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


class KernelOperations(Operations):
    """Computes products, norms, attention and cache writes in Triton kernels, the rest by torch. Attention covers all
    slots up to a token's own, so it needs no mask and no `spans`.

    Twin: Operations, close(1e-4) in float32, since sums are reordered.
    """

    def __init__(self, kernels: KernelSet, config: LiveConfig, num_layers: int) -> None:
        """Takes the kernels, and from a model's config the sliding window of each layer."""
        super().__init__(kernels.product)
        self.kernels = kernels
        window, kinds = sliding_window(config), getattr(text_config(config), "layer_types", None)
        slides = [kind == "sliding_attention" for kind in kinds] if kinds else [True] * num_layers
        self.windows = [window if is_sliding else None for is_sliding in slides]

    def norm(self, values: Tensor, norm: Norm) -> Tensor:
        """Returns the RMSNorm of `values` [..., m], in the dtype of `values`."""
        return self.kernels.norm(values, *norm)

    def attended(
        self, cache: StagedCache, layer: int, heads: Sequence[Tensor], mask: Tensor, scale: float
    ) -> Float[Tensor, "b t w"]:
        """Stores keys and values at the positions of `cache`, and returns the attention outputs [b, t, h * d].
        heads: new queries [b, t, h, d], keys and values [b, t, g, d].  mask: read by torch's attention alone, which
        computes over a cache that is not written (`SharedPrefix`)."""
        if not cache.is_written:
            return super().attended(cache, layer, heads, mask, scale)
        q, k, v = (part.transpose(1, 2) for part in heads)
        cache.store(layer, k, v)
        return self.attend(cache, layer, q, scale)

    def attend(
        self, cache: StagedCache, layer: int, q: Float[Tensor, "b h t d"], scale: float | None
    ) -> Float[Tensor, "b t w"]:
        """Returns attention outputs [b, t, h * d] of the queries q. The keys and values of these tokens are already in
        the cache. scale: of the scores; None for d ** -0.5."""
        placed, factor = cache.placed(q.device), q.shape[-1] ** -0.5 if scale is None else scale
        held = cache.keys[layer], cache.values[layer], placed.rows, placed.positions
        out = self.kernels.attend(q, *held, factor, cache.hidden_slots(layer), self.windows[layer])
        return out.transpose(1, 2).flatten(2)
