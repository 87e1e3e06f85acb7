"""Runs the forward of GPT-2 and GPT-NeoX without their modules: the same operations in the same order."""

from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import layer_norm, linear

from cacheprobe.core.live import LiveModule
from cacheprobe.kvcache.cache import KVCache
from cacheprobe.models.fast.functional import Affine, FunctionalForward, Listeners, Product, Turn, affine, tell
from cacheprobe.models.hf.attention import ATTENTION, attend_over_cache
from cacheprobe.ops.compiled.block import CompiledBlock


class _Block(NamedTuple):
    before_attention: Affine
    joint: Affine
    """Computes queries, keys and values in one product."""
    out: Affine
    before_mlp: Affine
    up: Affine
    down: Affine
    activation: Affine
    scale: float


class FunctionalGPT(FunctionalForward):
    """Runs the forward of GPT-2 or GPT-NeoX."""

    def __init__(self, model: LiveModule, product: Product = linear, compiled: CompiledBlock | None = None) -> None:
        """product: function that computes values weight^T + bias for the model's linear layers.  compiled: not used; it
        computes no norm of these families.

        The model's tensors are not copied.
        """
        config = model.config
        self.heads = int(config.num_attention_heads)
        self.is_neox = type(model).__name__ == "GPTNeoXForCausalLM"
        if self.is_neox:
            decoder = model.gpt_neox
            self.is_parallel = bool(config.use_parallel_residual)
            self.embedding, self.positions, self.rotary = decoder.embed_in, None, decoder.rotary_emb
            self.blocks = [_neox_block(layer, product) for layer in decoder.layers]
            self.norm = _norm(decoder.final_layer_norm)
        else:
            decoder = model.transformer
            self.is_parallel = False
            self.embedding, self.positions, self.rotary = decoder.wte, decoder.wpe, None
            self.blocks = [_gpt2_block(layer) for layer in decoder.h]
            self.norm = _norm(decoder.ln_f)
        self.kinds = ["full_attention"] * len(self.blocks)
        self.unembed = affine(product, model.lm_head)

    @staticmethod
    def takes(model: LiveModule) -> bool:
        """Returns whether the model belongs to a family that this class computes, with fused attention."""
        config, name = model.config, type(model).__name__
        is_plain = name == "GPTNeoXForCausalLM" or (name == "GPT2LMHeadModel" and not config.add_cross_attention)
        return is_plain and config._attn_implementation == ATTENTION

    def embed(self, token_ids: Int[Tensor, "b t"], position_ids: Int[Tensor, "b t"]) -> tuple[Tensor, Turn | None]:
        """Returns the embedded tokens, and the rotations of these positions if the model rotates."""
        stream = self.embedding(token_ids)
        if self.positions is not None:
            stream = stream + self.positions(position_ids)
        return stream, self.rotary(stream, position_ids=position_ids) if self.rotary is not None else None

    def _block(
        self, layer: int, stream: Tensor, cache: KVCache, turn: Turn | None, mask: Tensor, listeners: Listeners
    ) -> Tensor:
        block = self.blocks[layer]
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


def _neox_block(layer: LiveModule, product: Product) -> _Block:
    attention, mlp = layer.attention, layer.mlp
    return _Block(
        before_attention=_norm(layer.input_layernorm),
        joint=affine(product, attention.query_key_value),
        out=affine(product, attention.dense),
        before_mlp=_norm(layer.post_attention_layernorm),
        up=affine(product, mlp.dense_h_to_4h),
        down=affine(product, mlp.dense_4h_to_h),
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
