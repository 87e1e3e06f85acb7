"""The forward of GPT-2 and GPT-NeoX without their modules: the same operations in the same order, over our KV cache.

This file does not register hooks: the caller passes functions that receive the activations.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import layer_norm, linear

from cacheprobe.core.live import LiveModule
from cacheprobe.kvcache.cache import KVCache
from cacheprobe.models.fast.functional import Listeners, Product, tell
from cacheprobe.models.hf.attention import ATTENTION, attend_over_cache

Affine = Callable[[Tensor], Tensor]


class _Block(NamedTuple):
    before_attention: Affine
    joint: Affine
    """Computes queries, keys and values in one product."""
    out: Affine
    before_mlp: Affine
    up: Affine
    down: Affine
    activation: Callable[[Tensor], Tensor]
    scale: float


class LeanGPT:
    """Runs a GPT-2 or GPT-NeoX forward over a KVCache.

    Twin: the model's own modules (`HookedHF` with lean=False), bitwise, for logits, states, keys and values.
    """

    def __init__(self, model: LiveModule, product: Product = linear) -> None:
        """product: function that computes values weight^T + bias for the model's linear layers. Tensors are not
        copied."""
        self.product = product
        config = model.config
        self.heads = int(config.num_attention_heads)
        self.is_neox = type(model).__name__ == "GPTNeoXForCausalLM"
        if self.is_neox:
            decoder = model.gpt_neox
            self.is_parallel = bool(config.use_parallel_residual)
            self.embed, self.positions, self.turn = decoder.embed_in, None, decoder.rotary_emb
            self.blocks = [self._neox_block(layer) for layer in decoder.layers]
            self.norm = _norm(decoder.final_layer_norm)
        else:
            decoder = model.transformer
            self.is_parallel = False
            self.embed, self.positions, self.turn = decoder.wte, decoder.wpe, None
            self.blocks = [_gpt2_block(layer) for layer in decoder.h]
            self.norm = _norm(decoder.ln_f)
        self.unembed = self._linear(model.lm_head)

    @staticmethod
    def takes(model: LiveModule) -> bool:
        """Returns whether the model belongs to a family that this class computes, with fused attention."""
        config, name = model.config, type(model).__name__
        is_plain = name == "GPTNeoXForCausalLM" or (name == "GPT2LMHeadModel" and not config.add_cross_attention)
        return is_plain and config._attn_implementation == ATTENTION

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
        `num_layers` blocks."""
        assert isinstance(masks, Tensor), "these families have one kind of layer"
        stream = self.embed(token_ids)
        if self.positions is not None:
            stream = stream + self.positions(position_ids)
        turn = self.turn(stream, position_ids=position_ids) if self.turn is not None else None
        if num_layers == 0:
            tell(listeners, "pre", 0, stream)
            return stream
        for layer, block in enumerate(self.blocks[:num_layers]):
            tell(listeners, "pre", layer, stream)
            stream = self._block(layer, block, stream, cache, turn, masks, listeners)
            tell(listeners, "S", layer, stream)
        if num_layers is not None:
            return stream
        last = self.norm(stream)
        if logit_slots is not None:
            last = last[:, torch.tensor(list(logit_slots), device=last.device)]
        return self.unembed(last)

    def _block(
        self,
        layer: int,
        block: _Block,
        stream: Tensor,
        cache: KVCache,
        turn: tuple[Tensor, Tensor] | None,
        mask: Tensor,
        listeners: Listeners,
    ) -> Tensor:
        q, k, v = self._heads(block.joint(block.before_attention(stream)))
        if turn is not None:
            q, k = _turned(q, *turn), _turned(k, *turn)
        attended = block.out(attend_over_cache(cache, layer, q, k, v, mask, block.scale))
        tell(listeners, "T", layer, attended)
        behind = attended + stream
        read = block.before_mlp(stream if self.is_parallel else behind)
        written = block.down(block.activation(block.up(read)))
        tell(listeners, "C", layer, written)
        return written + attended + stream if self.is_parallel else written + behind

    def _heads(self, joint: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries, keys and values, [b, h, t, d] each. GPT-NeoX stores the three side by side within each
        head."""
        if self.is_neox:
            q, k, v = joint.unflatten(-1, (self.heads, -1)).transpose(1, 2).chunk(3, -1)
        else:
            q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in joint.chunk(3, -1))
        return q, k, v

    def _linear(self, module: LiveModule) -> Affine:
        return lambda values: self.product(values, module.weight, module.bias)

    def _neox_block(self, layer: LiveModule) -> _Block:
        attention, mlp = layer.attention, layer.mlp
        return _Block(
            before_attention=_norm(layer.input_layernorm),
            joint=self._linear(attention.query_key_value),
            out=self._linear(attention.dense),
            before_mlp=_norm(layer.post_attention_layernorm),
            up=self._linear(mlp.dense_h_to_4h),
            down=self._linear(mlp.dense_4h_to_h),
            activation=mlp.act,
            scale=float(attention.scaling),
        )


def _gpt2_block(layer: LiveModule) -> _Block:
    attention, mlp = layer.attn, layer.mlp
    return _Block(
        before_attention=_norm(layer.ln_1),
        joint=_conv(attention.c_attn),
        out=_conv(attention.c_proj),
        before_mlp=_norm(layer.ln_2),
        up=_conv(mlp.c_fc),
        down=_conv(mlp.c_proj),
        activation=mlp.act,
        scale=float(attention.scaling),
    )


def _conv(module: LiveModule) -> Affine:
    """Returns GPT-2's Conv1D as a function; its weights are stored [inputs, outputs]."""
    return lambda values: torch.addmm(module.bias, values.view(-1, values.shape[-1]), module.weight).view(
        *values.shape[:-1], -1
    )


def _norm(module: LiveModule) -> Affine:
    return lambda values: layer_norm(values, module.normalized_shape, module.weight, module.bias, module.eps)


def _turned(values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first numbers of each head by position and leaves the others unchanged (partial rotary embedding)."""
    cos, sin = cos[:, None], sin[:, None]
    turned, rest = values[..., : cos.shape[-1]], values[..., cos.shape[-1] :]
    first, second = turned.chunk(2, -1)
    return torch.cat((turned * cos + torch.cat((-second, first), -1) * sin, rest), -1)
