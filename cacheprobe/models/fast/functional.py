"""The forward of llama-like decoders without their modules: the same operations in the same order, over our KV cache.

For a small model, modules, decorators, keyword arguments and a cache interface cost more time than the arithmetic. This
file does not register hooks: the caller passes functions that receive the activations.
"""

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
from cacheprobe.ops.compiled.block import CompiledBlock

FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Computes values weight^T + bias."""

Listeners = Mapping[tuple[str, int], Sequence[Callable[[Tensor], object]]]
"""Functions to call with an activation, keyed by (site, layer); sites are pre, S, T and C."""


class _Linear(NamedTuple):
    weight: Tensor
    bias: Tensor | None


class _Norm(NamedTuple):
    weight: Tensor
    eps: float


class _Block(NamedTuple):
    before_attention: _Norm
    qkv: tuple[_Linear, _Linear, _Linear]
    q_norm: _Norm | None
    k_norm: _Norm | None
    o: _Linear
    before_mlp: _Norm
    gate: _Linear
    up: _Linear
    down: _Linear
    activation: Callable[[Tensor], Tensor]
    kind: str
    """The block's mask kind, if the config lists kinds of layers."""


class FunctionalForward:
    """Runs a llama-like model's forward over a KVCache.

    Twin: the model's own modules (`HookedHF` with lean=False), bitwise, for logits, states, keys and values.
    """

    def __init__(self, model: LiveModule, product: Product = linear, compiled: CompiledBlock | None = None) -> None:
        """product: function that computes values weight^T + bias.  compiled: computes norms and rotations instead of
        torch.

        The model's tensors are not copied.
        """
        self.model, self.product = model, product
        self._rms_norm = partial(_compiled_norm, compiled) if compiled else _rms_norm
        self._turned = partial(_compiled_turn, compiled) if compiled else _turned
        config, decoder = model.config, model.model
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(decoder.layers)
        self.blocks = [_block(layer, kind) for layer, kind in zip(decoder.layers, kinds, strict=True)]
        attention = decoder.layers[0].self_attn
        self.d_head, self.scale = int(attention.head_dim), float(attention.scaling)
        self.norm, self.unembed = _norm(decoder.norm), _linear(model.lm_head)

    @staticmethod
    def takes(model: LiveModule) -> bool:
        """Returns whether the model belongs to a family that this class computes, with fused attention."""
        return type(model).__name__ in FAMILIES and model.config._attn_implementation == ATTENTION

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
        """Returns logits [b, t, v] (of `logit_slots` only, if given), or the residual stream [b, t, m] after
        `num_layers` blocks.

        Writes keys and values at the positions staged on the cache.
        """
        stream = self.model.model.embed_tokens(token_ids)
        turn = _turn(*self.model.model.rotary_emb(stream, position_ids=position_ids))
        if num_layers == 0:
            tell(listeners, "pre", 0, stream)
            return stream
        for layer, block in enumerate(self.blocks[:num_layers]):
            tell(listeners, "pre", layer, stream)
            mask = masks if isinstance(masks, Tensor) else masks[block.kind]
            stream = self._block(layer, block, stream, cache, turn, mask, listeners)
            tell(listeners, "S", layer, stream)
        if num_layers is not None:
            return stream
        last = self._rms_norm(stream, self.norm)
        if logit_slots is not None:
            last = last[:, torch.tensor(list(logit_slots), device=last.device)]
        return self.product(last, *self.unembed)

    def _block(
        self,
        layer: int,
        block: _Block,
        stream: Tensor,
        cache: KVCache,
        turn: tuple[Tensor, Tensor],
        mask: Tensor,
        listeners: Listeners,
    ) -> Tensor:
        product, heads = self.product, (*stream.shape[:2], -1, self.d_head)
        read = self._rms_norm(stream, block.before_attention)
        q, k, v = (product(read, *part).view(heads) for part in block.qkv)
        if block.q_norm is not None and block.k_norm is not None:
            q, k = self._rms_norm(q, block.q_norm), self._rms_norm(k, block.k_norm)
        q, k = self._turned(q, k, turn)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        attended = product(attend_over_cache(cache, layer, q, k, v, mask, self.scale), *block.o)
        tell(listeners, "T", layer, attended)
        stream = stream + attended
        read = self._rms_norm(stream, block.before_mlp)
        gate, up = product(read, *block.gate), product(read, *block.up)
        written = product(block.activation(gate) * up, *block.down)
        tell(listeners, "C", layer, written)
        return stream + written


def tell(listeners: Listeners, site: str, layer: int, value: Tensor) -> None:
    """Calls every listener registered for this (site, layer) with the value."""
    for hear in listeners.get((site, layer), ()):
        hear(value)


def _rms_norm(values: Tensor, norm: _Norm) -> Tensor:
    """Applies RMSNorm: mean square in float32 (in float64 for float64 input), product with the weight in the model's
    dtype."""
    wide = values if values.dtype == torch.float64 else values.float()
    scale = wide.pow(2).mean(-1, keepdim=True).add_(norm.eps).rsqrt_()
    scaled = wide.mul_(scale) if wide is not values else wide * scale
    return norm.weight * scaled.to(values.dtype)


def _turn(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (cos, sin), [b, t, 1, d] each. The first half of sin is negated: (-x) s equals x (-s), bit for bit."""
    first, second = sin.chunk(2, -1)
    return cos[:, :, None], torch.cat((-first, second), -1)[:, :, None]


def _turned(q: Float[Tensor, "b t h d"], k: Float[Tensor, "b t g d"], turn: tuple[Tensor, Tensor]) -> Sequence[Tensor]:
    cos, sin = turn
    both = torch.cat((q, k), 2)
    first, second = both.chunk(2, -1)
    turned = (both * cos).add_(torch.cat((second, first), -1).mul_(sin))
    return turned.split((q.shape[2], k.shape[2]), 2)


def _compiled_norm(compiled: CompiledBlock, values: Tensor, norm: _Norm) -> Tensor:
    return compiled.rms_norm(values, *norm)


def _compiled_turn(compiled: CompiledBlock, q: Tensor, k: Tensor, turn: tuple[Tensor, Tensor]) -> Sequence[Tensor]:
    """Rotates in place: q and k are fresh tensors that no other code holds."""
    return compiled.turn_(q.contiguous(), *turn), compiled.turn_(k.contiguous(), *turn)


def _linear(module: LiveModule) -> _Linear:
    return _Linear(module.weight, module.bias)


def _norm(module: LiveModule) -> _Norm:
    return _Norm(module.weight, float(module.variance_epsilon))


def _block(layer: LiveModule, kind: str) -> _Block:
    attention, mlp = layer.self_attn, layer.mlp
    return _Block(
        before_attention=_norm(layer.input_layernorm),
        qkv=(_linear(attention.q_proj), _linear(attention.k_proj), _linear(attention.v_proj)),
        q_norm=_norm(attention.q_norm) if hasattr(attention, "q_norm") else None,
        k_norm=_norm(attention.k_norm) if hasattr(attention, "k_norm") else None,
        o=_linear(attention.o_proj),
        before_mlp=_norm(layer.post_attention_layernorm),
        gate=_linear(mlp.gate_proj),
        up=_linear(mlp.up_proj),
        down=_linear(mlp.down_proj),
        activation=mlp.act_fn,
        kind=kind,
    )
