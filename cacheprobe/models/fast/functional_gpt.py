"""Computes the forward of GPT-2 and GPT-NeoX without calling their modules: the same operations in the same order."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import layer_norm

from cacheprobe.core.live import LiveModule
from cacheprobe.models.fast.functional import FunctionalForward, affine
from cacheprobe.models.fast.operations import Affine, Operations, PassInputs, Rotation
from cacheprobe.models.hf.attention import ATTENTION

_Function = Callable[[Tensor], Tensor]


class _GPTBlock(NamedTuple):
    before_attention: _Function
    joint: _Function
    """Projection that computes queries, keys and values in one product."""
    out: _Function
    before_mlp: _Function
    up: _Function
    down: _Function
    activation: _Function
    scale: float


class FunctionalGPT(FunctionalForward):
    """Computes the forward of GPT-2 and GPT-NeoX models without calling their modules. Norms and rotations are computed
    by torch."""

    def __init__(self, model: LiveModule, operations: Operations) -> None:
        """Takes the tensors of `model` without copying. operations: compute each operation at once."""
        self.model, self.operations = model, operations
        config = model.config
        self.heads = int(config.num_attention_heads)
        self.is_neox = type(model).__name__ == "GPTNeoXForCausalLM"
        if self.is_neox:
            decoder = model.gpt_neox
            self.is_parallel = bool(config.use_parallel_residual)
            self.embedding, self.positions, self.rotary = decoder.embed_in, None, decoder.rotary_emb
            self._blocks = [_neox_block(layer, operations) for layer in decoder.layers]
            self._last_norm = _norm(decoder.final_layer_norm)
        else:
            decoder = model.transformer
            self.is_parallel = False
            self.embedding, self.positions, self.rotary = decoder.wte, decoder.wpe, None
            self._blocks = [_gpt2_block(layer, operations) for layer in decoder.h]
            self._last_norm = _norm(decoder.ln_f)
        self.kinds = ["full_attention"] * len(self._blocks)

    @staticmethod
    def takes(model: LiveModule) -> bool:
        """Returns True if `model` is a GPT-NeoX, or a GPT-2 without cross-attention, on cacheprobe's attention."""
        config, name = model.config, type(model).__name__
        is_plain = name == "GPTNeoXForCausalLM" or (name == "GPT2LMHeadModel" and not config.add_cross_attention)
        return is_plain and config._attn_implementation == ATTENTION

    def last_norm(self, stream: Float[Tensor, "b t m"]) -> Float[Tensor, "b t m"]:
        """Returns the residual stream after the final norm."""
        return self._last_norm(stream)

    @property
    def unembedding(self) -> Affine:
        """The linear layer that computes logits."""
        return affine(self.model.lm_head)

    def embed(self, token_ids: Int[Tensor, "b t"], position_ids: Int[Tensor, "b t"]) -> tuple[Tensor, Rotation | None]:
        """Returns (embedded tokens [b, t, m], rotation). The rotation is the cosines and sines of the rotary embedding
        at these positions, [b, t, d] each; None for GPT-2, which adds a position table to the tokens instead."""
        stream = self.embedding(token_ids)
        if self.positions is not None:
            stream = stream + self.positions(position_ids)
        return stream, self.rotary(stream, position_ids=position_ids) if self.rotary is not None else None

    def _block(self, operations: Operations, layer: int, stream: Tensor, inputs: PassInputs, kind: str) -> Tensor:
        block, rotation, listeners = self._blocks[layer], inputs.rotation, inputs.listeners
        q, k, v = self._heads(block.joint(block.before_attention(stream)))
        if rotation is not None:
            q, k = _rotated(q, *rotation), _rotated(k, *rotation)
        attended = block.out(operations.attended(inputs.cache, layer, (q, k, v), inputs.mask(kind), block.scale))
        operations.pass_on(attended, listeners.get(("T", layer), ()))
        after_attention = attended + stream
        normed = block.before_mlp(stream if self.is_parallel else after_attention)
        mlp_out = block.down(block.activation(block.up(normed)))
        operations.pass_on(mlp_out, listeners.get(("C", layer), ()))
        return mlp_out + attended + stream if self.is_parallel else mlp_out + after_attention

    def _heads(self, joint: Tensor) -> Sequence[Tensor]:
        """Returns (queries, keys, values), [b, t, h, d] each, from the output of the joint projection."""
        if self.is_neox:
            return joint.unflatten(-1, (self.heads, -1)).chunk(3, -1)
        return [part.unflatten(-1, (self.heads, -1)) for part in joint.chunk(3, -1)]


def _neox_block(layer: LiveModule, operations: Operations) -> _GPTBlock:
    """Returns the functions and the attention scale of one GPT-NeoX layer as a _GPTBlock."""
    attention, mlp = layer.attention, layer.mlp
    return _GPTBlock(
        before_attention=_norm(layer.input_layernorm),
        joint=_linear(attention.query_key_value, operations),
        out=_linear(attention.dense, operations),
        before_mlp=_norm(layer.post_attention_layernorm),
        up=_linear(mlp.dense_h_to_4h, operations),
        down=_linear(mlp.dense_4h_to_h, operations),
        activation=mlp.act,
        scale=float(attention.scaling),
    )


def _gpt2_block(layer: LiveModule, operations: Operations) -> _GPTBlock:
    """Returns the functions and the attention scale of one GPT-2 layer as a _GPTBlock."""
    attention, mlp = layer.attn, layer.mlp
    return _GPTBlock(
        before_attention=_norm(layer.ln_1),
        joint=_linear(attention.c_attn, operations),
        out=_linear(attention.c_proj, operations),
        before_mlp=_norm(layer.ln_2),
        up=_linear(mlp.c_fc, operations),
        down=_linear(mlp.c_proj, operations),
        activation=mlp.act,
        scale=float(attention.scaling),
    )


def _linear(module: LiveModule, operations: Operations) -> _Function:
    """Returns a linear layer as a function of its input."""
    return lambda values: operations.products(values, (affine(module),))[0]


def _norm(module: LiveModule) -> _Function:
    return lambda values: layer_norm(values, module.normalized_shape, module.weight, module.bias, module.eps)


def _rotated(values: Float[Tensor, "b t h d"], cos: Tensor, sin: Tensor) -> Tensor:
    """Returns queries or keys with the first numbers of each head rotated by position."""
    cos, sin = cos[:, :, None], sin[:, :, None]
    to_rotate, rest = values[..., : cos.shape[-1]], values[..., cos.shape[-1] :]
    first, second = to_rotate.chunk(2, -1)
    return torch.cat((to_rotate * cos + torch.cat((-second, first), -1) * sin, rest), -1)
