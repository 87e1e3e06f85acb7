"""Slow twins of the Thinking States model: one chunk after another, no cache, no pads, no rounds, no batches."""

from dataclasses import dataclass

import torch
from torch import Tensor

from cacheprobe.models.thinking.blocks import Block, alibi_slopes
from cacheprobe.models.thinking.model import ThinkingModel


@dataclass
class Reading:
    """What came of a text."""

    thoughts: list[tuple[int, ...]]
    logits: Tensor
    """[t, v]"""
    states: Tensor
    """[t, m]"""


@torch.inference_mode()
def read_slowly(model: ThinkingModel, token_ids: list[int], num_prompt: int) -> Reading:
    """Read a text whose first tokens are a prompt: after each whole chunk of it the whole text so far is run again."""
    config = model.config
    n, c = len(token_ids), config.chunk
    states = torch.zeros(n + c, config.d_model)
    if config.learned_first_state and config.feeds_back:
        states[:c] = model.first_state
    thoughts = []
    for start in range(0, n - c + 1, c):
        end = start + c
        if end > num_prompt and not config.think_while_decoding:
            break
        hidden = _through(model, token_ids[:end], states[:end], config.l_out)
        thoughts.append(_think(model, hidden[start:end]))
        if config.feeds_back:
            states[end : end + c] = _compress(model, thoughts[-1])
    out = _through(model, token_ids, states[:n], config.n_layers)
    return Reading(thoughts, model.unembed(_norm(out, model.ln_final.w)), states[:n])


def _through(model: ThinkingModel, token_ids: list[int], states: Tensor, num_layers: int) -> Tensor:
    x = model.embed.weight[token_ids]
    config = model.config
    for i in range(num_layers):
        if i == config.l_in:
            x = x + states
        x = _block(model.blocks[i], x, lambda q, k: _sees(k, q, config.attention_window), config)
    return x


def _sees(k: int, q: int, window: int | None) -> bool:
    return k <= q and (window is None or q - k < window)


def _think(model: ThinkingModel, hidden: Tensor) -> tuple[int, ...]:
    config, said = model.config, []
    c = len(hidden)
    while len(said) < config.max_thought:
        x = torch.cat([hidden, model.embed.weight[said]])

        def sees(q: int, k: int) -> bool:
            return k <= q or (config.bidirectional_prefix and q < c and k < c)

        for block in model.thinking.blocks:
            x = _block(block, x, sees, config, c if config.bidirectional_prefix else 0)
        logits = model.thinking.unembed(_norm(x[-1], model.thinking.ln_final.w))
        logits[config.pad_id] = -torch.inf
        said.append(int(logits.argmax()))
        if said[-1] == config.eos_id:
            break
    return tuple(said)


def _compress(model: ThinkingModel, thought: tuple[int, ...]) -> Tensor:
    config, block = model.config, model.compression.block
    c, n = config.chunk, len(thought)
    pads = max(c - n, 0) if config.pooling == "last" else 0
    x = model.embed.weight[[config.pad_id] * pads + list(thought)]
    real = range(pads, pads + n)
    if config.pooling == "query":
        x = torch.cat([x, model.compression.queries])

    def sees(q: int, k: int) -> bool:
        if config.compression_is_causal:
            return k == q or (k in real and k <= q)
        return k in real

    return _block(block, x, sees, config, both_ways=True)[-c:]


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def _block(block: Block, x: Tensor, sees, config, prefix: int = 0, both_ways: bool = False) -> Tensor:
    """One layer over [t, m], head by head and query by query."""
    normed = _norm(x, block.ln1.w)
    q, k, v = (normed @ block.attn.qkv.weight.T).chunk(3, dim=-1)
    d, out = config.d_head, torch.zeros_like(x)
    for head in range(config.n_heads):
        part = slice(head * d, (head + 1) * d)
        qh, kh = q[:, part], k[:, part]
        if config.positions == "rope":
            qh, kh = _turned(qh, config.rope_theta), _turned(kh, config.rope_theta)
        for i in range(len(x)):
            keys = [j for j in range(len(x)) if sees(i, j)]
            scores = kh[keys] @ qh[i] / d**0.5
            if config.positions == "alibi":
                slope = float(alibi_slopes(config.n_heads)[head])
                free = i < prefix
                scores = scores - torch.tensor([0.0 if free and j < prefix else slope * abs(i - j) for j in keys])
            out[i, part] = scores.softmax(0) @ v[keys, part]
    x = x + out @ block.attn.out.weight.T
    gate, up = (_norm(x, block.ln2.w) @ block.mlp.gate_up.weight.T).chunk(2, dim=-1)
    return x + (gate / (1 + (-gate).exp()) * up) @ block.mlp.down.weight.T


def _turned(x: Tensor, theta: float) -> Tensor:
    """Rotary embedding by complex numbers."""
    half = x.shape[-1] // 2
    angle = torch.arange(len(x))[:, None] * theta ** (-torch.arange(half) / half)
    turned = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], dim=-1)
