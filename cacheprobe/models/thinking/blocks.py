"""Defines a pre-norm decoder layer with TransformerLens' hook points, used in the backbone, the thinking block and the
compression block.

This file contains no code for chunks or thoughts. A `Memory` supplies keys and values: those of the current tokens, or
of our KVCache.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from cacheprobe.models.hf.hooked import HookPoint
from cacheprobe.models.thinking.config import ThinkingConfig
from cacheprobe.ops.attention import AttentionSpans, attend_by_request, first_slots

Remembered = tuple[Tensor, Tensor, Tensor | None] | tuple[Tensor, Tensor, Tensor, AttentionSpans | None]
"""All keys and values [b, g, s, d] that a layer attends to, and an additive mask [b, h or 1, t, s]. If the mask is
None, attention is causal over the current tokens. With AttentionSpans, each request attends by itself, so that its bits
do not depend on its batch index."""

Memory = Callable[[int, Tensor, Tensor], Remembered]
"""Function (layer, keys, values [b, g, t, d] of the current tokens) -> Remembered: what these tokens attend to."""


class RMSNorm(nn.Module):
    """Computes the root-mean-square norm with a learned weight, and has a hook point on its output. Source: Zhang and
    Sennrich 2019 (arXiv 1910.07467)."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(width))
        self.eps = eps
        self.hook_normalized = HookPoint()

    def forward(self, x: Tensor) -> Tensor:
        """Returns the normalised input [..., m], after the hook."""
        return self.hook_normalized(F.rms_norm(x, (x.shape[-1],), self.w, self.eps))


def alibi_slopes(n_heads: int, device: torch.device | str = "cpu") -> Tensor:
    """Returns the ALiBi slopes of `n_heads` heads, [h]: 2^(-8 i / h) for i = 1 to h. Source: Press et al. 2022 (arXiv
    2108.12409), section 3."""
    return 2.0 ** (-8.0 * torch.arange(1, n_heads + 1, device=device) / n_heads)


def attention_bias(config: ThinkingConfig, queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Returns the additive bias [b, h or 1, t, s] of causal attention (mask, and ALiBi if configured), from query
    positions [b, t] and key positions [b or 1, s].

    window: number of positions that a token sees, including its own; None for all up to its own.
    """
    distance = queries[:, :, None] - keys[:, None, :]
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    bias = torch.zeros(distance.shape, device=queries.device)
    bias = bias.masked_fill_(hidden, torch.finfo(bias.dtype).min)[:, None]
    if config.positions == "alibi":
        slopes = alibi_slopes(config.n_heads, queries.device)[:, None, None]
        bias = bias - (slopes * distance[:, None].clamp(min=0))
    return bias


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Returns queries or keys x [b, h, t, d] after the rotary embedding at positions [b or 1, t]. Source: Su et al.
    2021 (arXiv 2104.09864)."""
    half = x.shape[-1] // 2
    angle_dtype = torch.promote_types(x.dtype, torch.float32)
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=angle_dtype) / half)
    angle = positions[:, None, :, None].to(angle_dtype) * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Attention(nn.Module):
    """Computes multi-head attention over the keys and values that a Memory supplies, with hook points."""

    def __init__(self, config: ThinkingConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        m = config.d_model
        self.qkv = nn.Linear(m, 3 * m, bias=False)
        self.out = nn.Linear(m, m, bias=False)
        self.hook_q, self.hook_k, self.hook_v = HookPoint(), HookPoint(), HookPoint()
        self.hook_pattern, self.hook_z = HookPoint(), HookPoint()

    def forward(self, x: Tensor, positions: Tensor, memory: Memory) -> Tensor:
        """Returns the attention output [b, t, m] of x [b, t, m]. memory: receives the new keys and values, and returns
        all keys and values to attend to."""
        config = self.config
        q, k, v = rearrange(self.qkv(x), "b t (part h d) -> part b t h d", part=3, h=config.n_heads)
        q, k, v = (rearrange(part, "b t h d -> b h t d") for part in (self.hook_q(q), self.hook_k(k), self.hook_v(v)))
        if config.positions == "rope":
            q, k = rotate(q, positions, config.rope_theta), rotate(k, positions, config.rope_theta)
        z = self.hook_z(attend(q, memory(self.layer, k, v), self.hook_pattern))  # [b, t, h, d]
        return self.out(rearrange(z, "b t h d -> b t (h d)"))

    @property
    def projection(self) -> nn.Linear:
        """Output projection from all heads, side by side, to the residual stream."""
        return self.out

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """(number of heads, key width, value width) of the cached keys and values."""
        return self.config.n_heads, self.config.d_head, self.config.d_head


def attend(q: Tensor, remembered: Remembered, hook_pattern: HookPoint) -> Tensor:
    """Returns attention outputs [b, t, h, d] of queries [b, h, t, d] over `remembered`: keys, values and mask. The
    attention pattern is computed explicitly only if `hook_pattern` has hooks."""
    keys, values, bias, *spans = remembered
    if bias is not None and spans and spans[0] is not None and not hook_pattern.fwd_hooks:
        joined = attend_by_request(q, partial(first_slots, keys, values), bias, spans[0], None)
        return rearrange(joined, "b t (h d) -> b t h d", h=q.shape[1])
    if (repeats := q.shape[1] // keys.shape[1]) > 1:
        keys, values = keys.repeat_interleave(repeats, dim=1), values.repeat_interleave(repeats, dim=1)
    if hook_pattern.fwd_hooks:
        z = hook_pattern(_pattern(q, keys, bias)) @ values
    elif bias is None:
        z = F.scaled_dot_product_attention(q, keys, values, is_causal=True)
    else:
        z = F.scaled_dot_product_attention(q, keys, values, attn_mask=bias.to(q.dtype))
    return rearrange(z, "b h t d -> b t h d")


def _pattern(q: Tensor, keys: Tensor, bias: Tensor | None) -> Tensor:
    """Returns the attention pattern [b, h, t, s] of queries and keys; causal if `bias` is None."""
    scores = q @ keys.transpose(-1, -2) / q.shape[-1] ** 0.5
    if bias is None:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        return scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return (scores + bias.to(q.dtype)).softmax(-1)


class GatedMLP(nn.Module):
    """Computes the SwiGLU feed-forward layer. Source: Shazeer 2020 (arXiv 2002.05202)."""

    def __init__(self, config: ThinkingConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.d_model, 2 * config.d_mlp, bias=False)
        self.down = nn.Linear(config.d_mlp, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the MLP output [b, t, m] of x [b, t, m]."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """Computes one pre-norm decoder layer: x + attention(norm(x)), then + mlp(norm(.)). The hook points are named as in
    TransformerLens.

    attn: called with (x, positions, memory), like Attention.
    """

    def __init__(self, ln1: nn.Module, attn: nn.Module, ln2: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.ln1, self.attn, self.ln2, self.mlp = ln1, attn, ln2, mlp
        self.hook_resid_pre, self.hook_attn_out, self.hook_resid_mid = HookPoint(), HookPoint(), HookPoint()
        self.hook_mlp_out, self.hook_resid_post = HookPoint(), HookPoint()

    def forward(self, x: Tensor, positions: Tensor, memory: Memory) -> Tensor:
        """Returns the residual stream [b, t, m] after this block."""
        x = self.hook_resid_pre(x)
        x = self.hook_resid_mid(x + self.hook_attn_out(self.attn(self.ln1(x), positions, memory)))
        return self.hook_resid_post(x + self.hook_mlp_out(self.mlp(self.ln2(x))))


def new_block(config: ThinkingConfig, layer: int) -> Block:
    """Returns a Block with new random weights. layer: the layer number that the block passes to its Memory, the
    function that supplies keys and values."""
    return Block(RMSNorm(config.d_model), Attention(config, layer), RMSNorm(config.d_model), GatedMLP(config))
