"""Wraps a layer of a live Hugging Face decoder as a `Block`, with TransformerLens' hook names and keys and values from
a Memory.

This file defines only the order of the steps; every weight, norm, rotation and activation belongs to the wrapped layer.
"""

from einops import rearrange
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from cacheprobe.core.live import LiveModule
from cacheprobe.models.hf.hooked import HookPoint
from cacheprobe.models.thinking.blocks import Block, Memory, attend


class HFNorm(nn.Module):
    """Computes a norm of a Hugging Face model, and has a hook point on its output."""

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        self.source = source
        self.hook_normalized = HookPoint()

    def forward(self, x: Tensor) -> Tensor:
        """Returns the normalised input [..., m], after the hook."""
        return self.hook_normalized(self.source(x))


class HFAttention(nn.Module):
    """Computes grouped-query attention with the weights of a Hugging Face layer, over the keys and values that a Memory
    supplies. rotary: returns the cosines and sines of positions [b or 1, t]."""

    def __init__(self, source: LiveModule, rotary: nn.Module, layer: int) -> None:
        super().__init__()
        self.source, self.rotary, self.layer = source, rotary, layer
        self.hook_q, self.hook_k, self.hook_v = HookPoint(), HookPoint(), HookPoint()
        self.hook_pattern, self.hook_z = HookPoint(), HookPoint()

    def forward(self, x: Tensor, positions: Tensor, memory: Memory) -> Tensor:
        """Returns the attention output [b, t, m] of x [b, t, m]. memory: receives the new keys and values, and returns
        all keys and values to attend to."""
        source = self.source
        q, k, v = (rearrange(project(x), "b t (h d) -> b t h d", d=source.head_dim) for project in self._projections())
        q, k, v = self.hook_q(q), self.hook_k(k), self.hook_v(v)
        if hasattr(source, "q_norm"):
            q, k = source.q_norm(q), source.k_norm(k)
        q, k, v = (rearrange(part, "b t h d -> b h t d") for part in (q, k, v))
        q, k = apply_rotary_pos_emb(q, k, *self.rotary(x, positions))
        z = self.hook_z(attend(q, memory(self.layer, k, v), self.hook_pattern))  # [b, t, h, d]
        return source.o_proj(rearrange(z, "b t h d -> b t (h d)"))

    def _projections(self) -> tuple[nn.Module, nn.Module, nn.Module]:
        return self.source.q_proj, self.source.k_proj, self.source.v_proj

    @property
    def projection(self) -> nn.Linear:
        """Output projection from all heads, side by side, to the residual stream."""
        return self.source.o_proj

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """(number of key and value heads, key width, value width) of the cached keys and values."""
        config, width = self.source.config, self.source.head_dim
        return config.num_key_value_heads, width, width


def hf_block(source: LiveModule, rotary: nn.Module, layer: int) -> Block:
    """Returns a Block around a pre-norm Hugging Face layer of the Llama kind; the weights are shared. layer: the layer
    number that the block passes to its Memory, the function that supplies keys and values; any number if used alone.

    Twin: the layer's own forward, close(1e-5) in float32.
    """
    norms = HFNorm(source.input_layernorm), HFNorm(source.post_attention_layernorm)
    return Block(norms[0], HFAttention(source.self_attn, rotary, layer), norms[1], source.mlp)
