"""Slow twin of Thinking States on a Hugging Face model: its own layers, one chunk after another, without a cache.

After each whole chunk of the prompt the whole text so far is run again; masks are written out.
"""

from typing import Any

import torch
from torch import Tensor

from cacheprobe.models.thinking.blocks import Block
from cacheprobe.models.thinking.pretrained import ThinkingPretrained
from tests.twins.thinking_slowly import Reading

LOWEST = torch.finfo(torch.float32).min


@torch.inference_mode()
def read_slowly(model: ThinkingPretrained, backbone: Any, token_ids: list[int], num_prompt: int) -> Reading:
    """Read a text whose first tokens are a prompt; `backbone` is what the model was made of."""
    c, n = model.config.chunk, len(token_ids)
    states = torch.zeros(1, n + c, model.config.d_model)
    thoughts = []
    for end in range(c, num_prompt + 1, c):
        hidden = _through(backbone, token_ids[:end], states[:, :end], model.config.l_in, model.config.l_out)
        thoughts.append(_think(model, backbone, hidden[:, end - c :]))
        states[:, end : end + c] = _compress(model, backbone, thoughts[-1])
    out = _through(backbone, token_ids, states[:, :n], model.config.l_in, model.config.n_layers)
    return Reading(thoughts, backbone.lm_head(backbone.model.norm(out))[0], states[0, :n])


def _through(backbone: Any, token_ids: list[int], states: Tensor, l_in: int, num_layers: int) -> Tensor:
    x = backbone.model.embed_tokens(torch.tensor([token_ids]))
    positions = torch.arange(len(token_ids))[None]
    for i, layer in enumerate(backbone.model.layers[:num_layers]):
        x = layer(
            x + states if i == l_in else x,
            attention_mask=_causal(len(token_ids)),
            position_ids=positions,
            position_embeddings=backbone.model.rotary_emb(x, positions),
        )
    return x


def _think(model: ThinkingPretrained, backbone: Any, hidden: Tensor) -> tuple[int, ...]:
    said: list[int] = []
    while len(said) < model.config.max_thought:
        x = torch.cat([hidden, backbone.model.embed_tokens(torch.tensor([said], dtype=torch.long))], dim=1)
        for block in model.thinking.blocks:
            x = _block(block, backbone, x, _causal(x.shape[1]))
        logits = model.thinking.unembed(model.thinking.ln_final.source(x[0, -1]))
        logits[model.config.pad_id] = -torch.inf
        said.append(int(logits.argmax()))
        if said[-1] == model.config.eos_id:
            break
    return tuple(said)


def _compress(model: ThinkingPretrained, backbone: Any, thought: tuple[int, ...]) -> Tensor:
    c = model.config.chunk
    pads = max(c - len(thought), 0)
    x = backbone.model.embed_tokens(torch.tensor([[model.config.pad_id] * pads + list(thought)]))
    mask = torch.zeros(1, 1, x.shape[1], x.shape[1])
    mask[..., :pads] = LOWEST
    return _block(model.compression.block, backbone, x, mask)[:, -c:]


def _block(block: Block, backbone: Any, x: Tensor, mask: Tensor) -> Tensor:
    """A copied layer, by the attention module's own forward."""
    turned = backbone.model.rotary_emb(x, torch.arange(x.shape[1])[None])
    x = x + block.attn.source(block.ln1.source(x), position_embeddings=turned, attention_mask=mask)[0]
    return x + block.mlp(block.ln2.source(x))


def _causal(n: int) -> Tensor:
    return torch.full((1, 1, n, n), LOWEST).triu(1)
