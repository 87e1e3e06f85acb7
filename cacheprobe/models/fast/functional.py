"""Computes the forward of Llama-like decoders, GPT-2 and GPT-NeoX without calling their modules: the same
operations, in the same order, on our KVCache.

For a small model, modules, decorators, keyword arguments and a cache interface cost more time than the arithmetic. This
file does not register hooks: the caller passes functions that receive the activations.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import layer_norm

from cacheprobe.core.live import LiveModule
from cacheprobe.kvcache.staged import StagedCache
from cacheprobe.models.fast.operations import Affine, Listeners, Masks, Operations, PassInputs, Rotation, affine
from cacheprobe.models.hf.attention import ATTENTION
from cacheprobe.models.weights import Norm

FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


class _LlamaBlock(NamedTuple):
    before_attention: Norm
    qkv: tuple[Affine, Affine, Affine]
    q_norm: Norm | None
    k_norm: Norm | None
    o: Affine
    before_mlp: Norm
    gate_and_up: tuple[Affine, Affine]
    down: Affine
    activation: LiveModule


class FunctionalForward(ABC):
    """Computes a model's forward over a KVCache without calling the model's modules (abstract). Each subclass computes
    the blocks of some model families.

    Twin: the model's own modules (`PlainLM` with `is_functional` False), bitwise, for logits, states, keys and values.
    """

    model: LiveModule
    kinds: Sequence[str]
    """Mask kind of each block, such as "full_attention", as the config lists kinds of layers."""
    operations: Operations

    @staticmethod
    @abstractmethod
    def takes(model: LiveModule) -> bool:
        """Returns True if this class can compute `model`: the class supports the model's family, and the model uses
        cacheprobe's attention."""

    @abstractmethod
    def last_norm(self, stream: Float[Tensor, "b t m"]) -> Float[Tensor, "b t m"]:
        """Returns the residual stream after the final norm."""

    @property
    def unembedding(self) -> Affine:
        """The linear layer that computes logits."""
        return affine(self.model.lm_head)

    @abstractmethod
    def embed(self, token_ids: Int[Tensor, "b t"], position_ids: Int[Tensor, "b t"]) -> tuple[Tensor, Rotation | None]:
        """Returns (residual stream [b, t, m] that enters block 0, rotation). The rotation is the cosines and sines of
        the rotary embedding at these positions, None if the model has no rotary embedding."""

    def __call__(
        self,
        token_ids: Int[Tensor, "b t"],
        cache: StagedCache,
        position_ids: Int[Tensor, "b t"],
        masks: Masks,
        listeners: Listeners,
        num_layers: int | None = None,
        logit_slots: Sequence[int] | None = None,
    ) -> Float[Tensor, "b n d"]:
        """Runs the model on token_ids [b, t] and returns logits [b, t, v], or only those of the token indices
        `logit_slots`, if given. If `num_layers` is given, returns the residual stream [b, t, m] after that many blocks.

        Writes keys and values at the positions of `cache`, and calls the `listeners` with the activations.
        """
        operations = self.operations
        operations.begin()
        stream, rotation = self.embed(token_ids, position_ids)
        stream = operations.run_blocks(self, PassInputs(stream, cache, rotation, masks, listeners, num_layers))
        operations.finish()
        if num_layers is not None:
            return stream
        if logit_slots is not None:
            stream = stream[:, torch.tensor(list(logit_slots), device=stream.device)]
        (logits,) = operations.products(self.last_norm(stream), (self.unembedding,))
        operations.finish()
        return logits

    def blocks(self, operations: Operations, inputs: PassInputs) -> Float[Tensor, "b t m"]:
        """Returns the residual stream after the blocks, computed by `operations` (see BlockForward)."""
        stream, listeners = inputs.stream, inputs.listeners
        if inputs.num_layers == 0:
            operations.pass_on(stream, listeners.get(("pre", 0), ()))
        for layer, kind in enumerate(self.kinds[: inputs.num_layers]):
            operations.pass_on(stream, listeners.get(("pre", layer), ()))
            stream = self._block(operations, layer, stream, inputs, kind)
            operations.pass_on(stream, listeners.get(("S", layer), ()))
        return stream

    @abstractmethod
    def _block(self, operations: Operations, layer: int, stream: Tensor, inputs: PassInputs, kind: str) -> Tensor:
        """Returns the residual stream [b, t, m] after block `layer`; writes the block's keys and values to `cache`."""


class FunctionalLlama(FunctionalForward):
    """Computes the forward of Llama, Mistral, Qwen2 and Qwen3 models without calling their modules."""

    def __init__(self, model: LiveModule, operations: Operations) -> None:
        """Takes the tensors of `model` without copying."""
        self.model, self.operations = model, operations
        config, decoder = model.config, model.model
        self.kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(decoder.layers)
        self._blocks = [_block(layer) for layer in decoder.layers]
        attention = decoder.layers[0].self_attn
        self.d_head, self.scale = int(attention.head_dim), float(attention.scaling)
        self._last_norm = _norm(decoder.norm)

    @staticmethod
    def takes(model: LiveModule) -> bool:
        """Returns True if `model` belongs to one of FAMILIES and uses cacheprobe's attention."""
        return type(model).__name__ in FAMILIES and model.config._attn_implementation == ATTENTION

    def last_norm(self, stream: Float[Tensor, "b t m"]) -> Float[Tensor, "b t m"]:
        """Returns the residual stream after the final norm."""
        return self.operations.norm(stream, self._last_norm)

    def embed(self, token_ids: Int[Tensor, "b t"], position_ids: Int[Tensor, "b t"]) -> tuple[Tensor, Rotation]:
        """Returns (embedded tokens [b, t, m], rotation). The rotation is the cosines and sines of the rotary embedding
        at these positions."""
        stream = self.model.model.embed_tokens(token_ids)
        cos, sin = self.model.model.rotary_emb(stream, position_ids=position_ids)
        first, second = sin.chunk(2, -1)
        return stream, (cos[:, :, None], torch.cat((-first, second), -1)[:, :, None])

    def _block(self, operations: Operations, layer: int, stream: Tensor, inputs: PassInputs, kind: str) -> Tensor:
        assert inputs.rotation is not None
        block, listeners = self._blocks[layer], inputs.listeners
        shape_by_head = (*stream.shape[:2], -1, self.d_head)
        normed = operations.norm(stream, block.before_attention)
        q, k, v = (part.view(shape_by_head) for part in operations.products(normed, block.qkv))
        if block.q_norm is not None and block.k_norm is not None:
            q, k = operations.norm(q, block.q_norm), operations.norm(k, block.k_norm)
        heads = (*operations.rotated(q, k, inputs.rotation), v)
        found = operations.attended(inputs.cache, layer, heads, inputs.mask(kind), self.scale)
        (attended,) = operations.products(found, (block.o,))
        operations.pass_on(attended, listeners.get(("T", layer), ()))
        stream = operations.added(stream, attended)
        gate, up = operations.products(operations.norm(stream, block.before_mlp), block.gate_and_up)
        (mlp_out,) = operations.products(operations.gated(gate, up, block.activation), (block.down,))
        operations.pass_on(mlp_out, listeners.get(("C", layer), ()))
        return operations.added(stream, mlp_out)


def _norm(module: LiveModule) -> Norm:
    return Norm(module.weight, float(module.variance_epsilon))


def _block(layer: LiveModule) -> _LlamaBlock:
    attention, mlp = layer.self_attn, layer.mlp
    return _LlamaBlock(
        before_attention=_norm(layer.input_layernorm),
        qkv=(affine(attention.q_proj), affine(attention.k_proj), affine(attention.v_proj)),
        q_norm=_norm(attention.q_norm) if hasattr(attention, "q_norm") else None,
        k_norm=_norm(attention.k_norm) if hasattr(attention, "k_norm") else None,
        o=affine(attention.o_proj),
        before_mlp=_norm(layer.post_attention_layernorm),
        gate_and_up=(affine(mlp.gate_proj), affine(mlp.up_proj)),
        down=affine(mlp.down_proj),
        activation=mlp.act_fn,
    )


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
            self._last_norm = _layer_norm(decoder.final_layer_norm)
        else:
            decoder = model.transformer
            self.is_parallel = False
            self.embedding, self.positions, self.rotary = decoder.wte, decoder.wpe, None
            self._blocks = [_gpt2_block(layer, operations) for layer in decoder.h]
            self._last_norm = _layer_norm(decoder.ln_f)
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
        before_attention=_layer_norm(layer.input_layernorm),
        joint=_linear(attention.query_key_value, operations),
        out=_linear(attention.dense, operations),
        before_mlp=_layer_norm(layer.post_attention_layernorm),
        up=_linear(mlp.dense_h_to_4h, operations),
        down=_linear(mlp.dense_4h_to_h, operations),
        activation=mlp.act,
        scale=float(attention.scaling),
    )


def _gpt2_block(layer: LiveModule, operations: Operations) -> _GPTBlock:
    """Returns the functions and the attention scale of one GPT-2 layer as a _GPTBlock."""
    attention, mlp = layer.attn, layer.mlp
    return _GPTBlock(
        before_attention=_layer_norm(layer.ln_1),
        joint=_linear(attention.c_attn, operations),
        out=_linear(attention.c_proj, operations),
        before_mlp=_layer_norm(layer.ln_2),
        up=_linear(mlp.c_fc, operations),
        down=_linear(mlp.c_proj, operations),
        activation=mlp.act,
        scale=float(attention.scaling),
    )


def _linear(module: LiveModule, operations: Operations) -> _Function:
    """Returns a linear layer as a function of its input."""
    return lambda values: operations.products(values, (affine(module),))[0]


def _layer_norm(module: LiveModule) -> _Function:
    return lambda values: layer_norm(values, module.normalized_shape, module.weight, module.bias, module.eps)


def _rotated(values: Float[Tensor, "b t h d"], cos: Tensor, sin: Tensor) -> Tensor:
    """Returns queries or keys with the first numbers of each head rotated by position."""
    cos, sin = cos[:, :, None], sin[:, :, None]
    to_rotate, rest = values[..., : cos.shape[-1]], values[..., cos.shape[-1] :]
    first, second = to_rotate.chunk(2, -1)
    return torch.cat((to_rotate * cos + torch.cat((-second, first), -1) * sin, rest), -1)


FUNCTIONAL = (FunctionalLlama, FunctionalGPT)
"""Classes that compute a forward without calling modules; each supports some model families."""
