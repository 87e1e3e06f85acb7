"""Heads that draft several tokens at once, the slow way: plain torch on the tensors of their files, without a cache."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu


def dflash_logits(
    weights: Mapping[str, Tensor],
    config: Mapping[str, Any],
    states: Tensor,
    block: Sequence[int],
    embedding: Tensor,
    unembedding: Tensor,
) -> Tensor:
    """Logits [B, v] of one block. states: [n - 1, l * m], of all positions before the newest token."""
    heads, width, eps = config["num_attention_heads"], config["head_dim"], config["rms_norm_eps"]

    def normed(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weights[f"{name}.weight"]

    def turned(x: Tensor, positions: Tensor) -> Tensor:
        """x [h, t, d], turned by its positions: dimension i and i + d / 2 are one plane."""
        angles = positions[:, None] * config["rope_theta"] ** (-torch.arange(0, width, 2) / width)
        a, b = x.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)

    context = normed(states @ weights["fc.weight"].T, "hidden_norm")
    stream, num_before = embedding[list(block)], len(states)
    positions = torch.arange(num_before + len(block)).float()
    for layer in range(config["num_hidden_layers"]):
        at = f"layers.{layer}."

        def split(x: Tensor, name: str, at: str = at) -> Tensor:
            """x [t, m] projected, as [h, t, d], each key head repeated for its queries."""
            own = (x @ weights[f"{at}self_attn.{name}_proj.weight"].T).view(len(x), -1, width)
            own = own if name == "v" else normed(own, f"{at}self_attn.{name}_norm")
            return own.transpose(0, 1).repeat_interleave(heads // own.shape[1], 0)

        entering = normed(stream, at + "input_layernorm")
        seen = torch.cat([context, entering])
        q, k = turned(split(entering, "q"), positions[num_before:]), turned(split(seen, "k"), positions)
        out = (q @ k.mT / width**0.5).softmax(-1) @ split(seen, "v")
        stream = stream + out.transpose(0, 1).flatten(1) @ weights[at + "self_attn.o_proj.weight"].T
        entering = normed(stream, at + "post_attention_layernorm")
        gate, up, down = (weights[f"{at}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        stream = stream + (silu(entering @ gate.T) * (entering @ up.T)) @ down.T
    return normed(stream, "norm") @ unembedding.T


def medusa_stream(weights: Mapping[str, Tensor], head: int, state: Tensor, num_layers: int) -> Tensor:
    """Stream [m] of one Medusa head after its blocks, by the names of Medusa's own file. state: [m], after the target's
    final norm."""
    for block in range(num_layers):
        state = state + silu(weights[f"{head}.{block}.linear.weight"] @ state + weights[f"{head}.{block}.linear.bias"])
    return state


def medusa_logits(weights: Mapping[str, Tensor], head: int, state: Tensor, num_layers: int) -> Tensor:
    """Logits [v] of one Medusa head, from its `medusa_stream`."""
    return weights[f"{head}.{num_layers}.weight"] @ medusa_stream(weights, head, state, num_layers)
