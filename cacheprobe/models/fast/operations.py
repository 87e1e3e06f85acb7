"""Makes the modules of a model compute in compiled loops, or in Triton kernels."""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from cacheprobe.core.live import LiveConfig, LiveModule
from cacheprobe.kvcache.staged import StagedCache
from cacheprobe.models.fast.tape import Tape
from cacheprobe.models.hf.masks import sliding_window, text_config
from cacheprobe.models.weights import Norm, is_conv, rms_norm_of
from cacheprobe.ops.compiled.operations import CompiledProduct
from cacheprobe.ops.compiled.queue import LLAMA, Queue
from cacheprobe.ops.kernel_set import KernelSet

Listeners = Mapping[tuple[str, int], Sequence[Callable[[Tensor], object]]]
"""Functions to call with an activation, keyed by (site, layer); sites are pre, S, T and C."""

Masks = Tensor | Mapping[str, Tensor]
"""Additive mask [b, 1, t, s], or one for each kind of layer."""


class Affine(NamedTuple):
    """Holds the tensors of a linear layer."""

    weight: Tensor
    bias: Tensor | None


class LoopOperations:
    """Computes products, norms and SiLUs in compiled loops; while a pass is recorded, gives them to its tape.

    Twin: the modules, close: each result is rounded alike, but sums have another order.
    """

    def __init__(self, compiled: CompiledProduct, dtype: torch.dtype) -> None:
        """dtype: of the model."""
        self.compiled, self.dtype = compiled, dtype
        self.tape: Tape | None = None
        self._queue = Queue(compiled.kind, dtype, 1)

    @property
    def _recording(self) -> Tape | None:
        return self.tape if self.tape is not None and self.tape.is_recording else None

    def product(self, values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns values weight^T + bias, [..., o]."""
        if (tape := self._recording) is None:
            return self.compiled(values, weight, bias)
        return tape.product(values.contiguous(), weight, bias)

    def norm(self, values: Tensor, norm: Norm) -> Tensor:
        """Returns the RMSNorm of `values` [..., m], in the dtype of `values`."""
        if (tape := self._recording) is not None:
            return tape.norm(values.contiguous(), norm)
        self._queue.clear()  # of what an interrupted call left
        out = self._queue.norm(values.contiguous(), *norm)
        self._queue.run()
        return out

    def silu(self, values: Tensor) -> Tensor:
        """Returns silu(values)."""
        if (tape := self._recording) is not None:
            return tape.silu(values.contiguous())
        self._queue.clear()
        out = self._queue.silu(values.contiguous())
        self._queue.run()
        return out

    def computes(self, module: LiveModule) -> bool:
        """Returns True for an RMSNorm and a SiLU."""
        return is_silu(module) or rms_norm_of(module) is not None

    def takes(self, values: Tensor) -> bool:
        """Returns True if the loops can compute with `values`: of the model's dtype, on the CPU, without gradients."""
        return values.dtype == self.dtype and values.device.type == "cpu" and not _needs_gradient(values)


class KernelOperations:
    """Computes products, norms and attention in Triton kernels. Attention covers all slots up to a token's own, so it
    needs no mask and no `spans`.

    Twin: the modules, close(1e-4) in float32, since sums are reordered.
    """

    def __init__(self, kernels: KernelSet, config: LiveConfig, num_layers: int) -> None:
        """Takes the kernels, and from a model's config the sliding window of each layer."""
        self.kernels, self.product = kernels, kernels.product
        window, kinds = sliding_window(config), getattr(text_config(config), "layer_types", None)
        slides = [kind == "sliding_attention" for kind in kinds] if kinds else [True] * num_layers
        self.windows = [window if is_sliding else None for is_sliding in slides]

    def computes(self, module: LiveModule) -> bool:
        """Returns True for an RMSNorm as Llama's, unless torch computes these."""
        norm = rms_norm_of(module)
        return norm is not None and norm.kind == LLAMA and "rms_norm" not in self.kernels.by_torch

    def takes(self, values: Tensor) -> bool:
        """Returns True for `values` without gradients."""
        return not _needs_gradient(values)

    def norm(self, values: Tensor, norm: Norm) -> Tensor:
        """Returns the RMSNorm of `values` [..., m], in the dtype of `values`."""
        return self.kernels.norm(values.contiguous(), norm.weight, norm.eps)

    def attend(
        self, cache: StagedCache, layer: int, q: Float[Tensor, "b h t d"], scale: float | None
    ) -> Float[Tensor, "b t w"]:
        """Returns attention outputs [b, t, h * d] of the queries q. The keys and values of these tokens are already in
        the cache. scale: of the scores; None for d ** -0.5."""
        placed, factor = cache.placed(q.device), q.shape[-1] ** -0.5 if scale is None else scale
        held = cache.keys[layer], cache.values[layer], placed.rows, placed.positions
        assert self.kernels.attend is not None
        out = self.kernels.attend(q, *held, factor, cache.hidden_slots(layer), self.windows[layer])
        return out.transpose(1, 2).flatten(2)


Operations = LoopOperations | KernelOperations


def is_silu(activation: LiveModule) -> bool:
    """Returns True if an activation module computes x / (1 + exp(-x))."""
    return isinstance(activation, nn.SiLU | SiLUActivation)


def replace_forward(module: LiveModule, operations: Operations | None) -> None:
    """Makes a module compute with other operations, or again by its own forward if there are none: linear layers, and
    what `operations.computes`. Other modules stay as they are, and inputs that need a gradient, or that `operations`
    does not take, are computed by the module's own forward."""
    if _is_replaced(module):
        del vars(module)["forward"]
    if operations is None:
        return
    if type(module) is nn.Linear or is_conv(module):
        vars(module)["forward"] = partial(_linear_by, operations, module, module.forward)
    elif operations.computes(module):
        compute = _silu_by if is_silu(module) else _norm_by
        vars(module)["forward"] = partial(compute, operations, module, module.forward)


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


_Forward = Callable[[Tensor], Tensor]


def _linear_by(operations: Operations, module: LiveModule, own: _Forward, values: Tensor) -> Tensor:
    return own(values) if _needs_gradient(values) else operations.product(values, *affine(module))


def _needs_gradient(values: Tensor) -> bool:
    return torch.is_grad_enabled() and values.requires_grad


def _norm_by(operations: Operations, module: LiveModule, own: _Forward, hidden_states: Tensor) -> Tensor:
    norm = rms_norm_of(module)
    if norm is None or not operations.takes(hidden_states):
        return own(hidden_states)
    return operations.norm(hidden_states, norm)


def _silu_by(operations: LoopOperations, module: LiveModule, own: _Forward, values: Tensor) -> Tensor:
    return operations.silu(values) if operations.takes(values) else own(values)
