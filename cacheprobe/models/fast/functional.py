"""Computes the forward of llama-like decoders without calling their modules: the same operations, in the same order, on
our KVCache.

For a small model, modules, decorators, keyword arguments and a cache interface cost more time than the arithmetic. This
file does not register hooks: the caller passes functions that receive the activations.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import linear

from cacheprobe.core.live import LiveModule
from cacheprobe.kvcache.cache import KVCache
from cacheprobe.models.hf.attention import ATTENTION, attend_over_cache

FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Function (values, weight, bias) -> values weight^T + bias."""

Affine = Callable[[Tensor], Tensor]

Rotation = tuple[Tensor, Tensor]
"""(cosines, sines) by which queries and keys are rotated at their positions."""

Listeners = Mapping[tuple[str, int], Sequence[Callable[[Tensor], object]]]
"""Functions to call with an activation, keyed by (site, layer); sites are pre, S, T and C."""


class _Norm(NamedTuple):
    weight: Tensor
    eps: float


class _LlamaBlock(NamedTuple):
    before_attention: _Norm
    qkv: tuple[Affine, Affine, Affine]
    q_norm: _Norm | None
    k_norm: _Norm | None
    o: Affine
    before_mlp: _Norm
    gate: Affine
    up: Affine
    down: Affine
    activation: Affine


class FunctionalForward(ABC):
    """Computes a model's forward over a KVCache without calling the model's modules (abstract). Each subclass computes
    the blocks of some model families.

    Twin: the model's own modules (`HookedHF` with functional=False), bitwise, for logits, states, keys and values.
    """

    kinds: Sequence[str]
    """Mask kind of each block, such as "full_attention", as the config lists kinds of layers."""
    norm: Affine
    """Final norm."""
    unembed: Affine

    @staticmethod
    @abstractmethod
    def takes(model: LiveModule) -> bool:
        """Returns True if this class can compute `model`: the class supports the model's family, and the model uses
        cacheprobe's attention."""

    @abstractmethod
    def embed(self, token_ids: Int[Tensor, "b t"], position_ids: Int[Tensor, "b t"]) -> tuple[Tensor, Rotation | None]:
        """Returns (residual stream [b, t, m] that enters block 0, rotation). The rotation is the cosines and sines of
        the rotary embedding at these positions, None if the model has no rotary embedding."""

    def __call__(
        self,
        token_ids: Int[Tensor, "b t"],
        cache: KVCache,
        position_ids: Int[Tensor, "b t"],
        masks: Tensor | Mapping[str, Tensor],
        listeners: Listeners,
        num_layers: int | None = None,
        logit_slots: Sequence[int] | None = None,
    ) -> Float[Tensor, "b n d"]:
        """Runs the model on token_ids [b, t] and returns logits [b, t, v], or only those of the token indices
        `logit_slots`, if given. If `num_layers` is given, returns the residual stream [b, t, m] after that many blocks.

        Writes keys and values at the positions staged on `cache`, and calls the `listeners` with the activations.
        """
        stream, rotation = self.embed(token_ids, position_ids)
        if num_layers == 0:
            call_listeners(listeners, "pre", 0, stream)
            return stream
        for layer, kind in enumerate(self.kinds[:num_layers]):
            call_listeners(listeners, "pre", layer, stream)
            mask = masks if isinstance(masks, Tensor) else masks[kind]
            stream = self._block(layer, stream, cache, rotation, mask, listeners)
            call_listeners(listeners, "S", layer, stream)
        if num_layers is not None:
            return stream
        last = self.norm(stream)
        if logit_slots is not None:
            last = last[:, torch.tensor(list(logit_slots), device=last.device)]
        return self.unembed(last)

    @abstractmethod
    def _block(
        self, layer: int, stream: Tensor, cache: KVCache, rotation: Rotation | None, mask: Tensor, listeners: Listeners
    ) -> Tensor:
        """Returns the residual stream [b, t, m] after block `layer`; writes the block's keys and values to `cache`."""


class FunctionalLlama(FunctionalForward):
    """Computes the forward of Llama, Mistral, Qwen2 and Qwen3 models without calling their modules."""

    def __init__(self, model: LiveModule, product: Product = linear) -> None:
        """Takes the tensors of `model` without copying. product: function that computes values weight^T + bias."""
        self.model = model
        config, decoder = model.config, model.model
        self.kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(decoder.layers)
        self.blocks = [_block(layer, product) for layer in decoder.layers]
        attention = decoder.layers[0].self_attn
        self.d_head, self.scale = int(attention.head_dim), float(attention.scaling)
        self.norm = partial(_rms_norm, norm=_norm(decoder.norm))
        self.unembed = affine(product, model.lm_head)

    @staticmethod
    def takes(model: LiveModule) -> bool:
        """Returns True if `model` belongs to one of FAMILIES and uses cacheprobe's attention."""
        return type(model).__name__ in FAMILIES and model.config._attn_implementation == ATTENTION

    def embed(self, token_ids: Int[Tensor, "b t"], position_ids: Int[Tensor, "b t"]) -> tuple[Tensor, Rotation]:
        """Returns (embedded tokens [b, t, m], rotation). The rotation is the cosines and sines of the rotary embedding
        at these positions."""
        stream = self.model.model.embed_tokens(token_ids)
        return stream, _rotation(*self.model.model.rotary_emb(stream, position_ids=position_ids))

    def _block(
        self, layer: int, stream: Tensor, cache: KVCache, rotation: Rotation | None, mask: Tensor, listeners: Listeners
    ) -> Tensor:
        assert rotation is not None
        block, shape_by_head = self.blocks[layer], (*stream.shape[:2], -1, self.d_head)
        normed = _rms_norm(stream, block.before_attention)
        q, k, v = (project(normed).view(shape_by_head) for project in block.qkv)
        if block.q_norm is not None and block.k_norm is not None:
            q, k = _rms_norm(q, block.q_norm), _rms_norm(k, block.k_norm)
        q, k = _rotated(q, k, rotation)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        attended = block.o(attend_over_cache(cache, layer, q, k, v, mask, self.scale))
        call_listeners(listeners, "T", layer, attended)
        stream = stream + attended
        normed = _rms_norm(stream, block.before_mlp)
        mlp_out = block.down(block.activation(block.gate(normed)) * block.up(normed))
        call_listeners(listeners, "C", layer, mlp_out)
        return stream + mlp_out


def call_listeners(listeners: Listeners, site: str, layer: int, value: Tensor) -> None:
    """Calls every listener that is registered for (site, layer) with the activation `value`."""
    for listener in listeners.get((site, layer), ()):
        listener(value)


def affine(product: Product, module: LiveModule) -> Affine:
    """Returns a linear layer as a function of its input. The function keeps the layer's present tensors."""
    weight, bias = module.weight, module.bias
    return lambda values: product(values, weight, bias)


def _rms_norm(values: Tensor, norm: _Norm) -> Tensor:
    """Returns the RMSNorm of `values` [..., m], in the dtype of `values`."""
    wide = values if values.dtype == torch.float64 else values.float()
    scale = wide.pow(2).mean(-1, keepdim=True).add_(norm.eps).rsqrt_()
    scaled = wide.mul_(scale) if wide is not values else wide * scale
    return norm.weight * scaled.to(values.dtype)


def _rotation(cos: Tensor, sin: Tensor) -> Rotation:
    """Returns (cos, sin) for `_rotated`, [b, t, 1, d] each; the first half of each vector of sin is negated."""
    first, second = sin.chunk(2, -1)
    return cos[:, :, None], torch.cat((-first, second), -1)[:, :, None]


def _rotated(q: Float[Tensor, "b t h d"], k: Float[Tensor, "b t g d"], rotation: Rotation) -> Sequence[Tensor]:
    """Returns queries [b, t, h, d] and keys [b, t, g, d] after the rotary embedding. rotation: from `_rotation`."""
    cos, sin = rotation
    both = torch.cat((q, k), 2)
    first, second = both.chunk(2, -1)
    rotated = (both * cos).add_(torch.cat((second, first), -1).mul_(sin))
    return rotated.split((q.shape[2], k.shape[2]), 2)


def _norm(module: LiveModule) -> _Norm:
    return _Norm(module.weight, float(module.variance_epsilon))


def _block(layer: LiveModule, product: Product) -> _LlamaBlock:
    attention, mlp = layer.self_attn, layer.mlp
    return _LlamaBlock(
        before_attention=_norm(layer.input_layernorm),
        qkv=(affine(product, attention.q_proj), affine(product, attention.k_proj), affine(product, attention.v_proj)),
        q_norm=_norm(attention.q_norm) if hasattr(attention, "q_norm") else None,
        k_norm=_norm(attention.k_norm) if hasattr(attention, "k_norm") else None,
        o=affine(product, attention.o_proj),
        before_mlp=_norm(layer.post_attention_layernorm),
        gate=affine(product, mlp.gate_proj),
        up=affine(product, mlp.up_proj),
        down=affine(product, mlp.down_proj),
        activation=mlp.act_fn,
    )
