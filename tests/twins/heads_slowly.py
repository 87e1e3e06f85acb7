"""Heads the slow way: plain hooks on an uncached Hugging Face model with eager attention, one text alone."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cacheprobe.models.heads.module import HeadModule

_OUTPUTS = ("o_proj", "dense", "c_proj")


def heads_slowly(model: PreTrainedModel, token_ids: Sequence[int]) -> dict[tuple[str, int], Tensor]:
    """q, k, v and z [t, h, d] and the pattern [h, t, t] of every layer, from modules named as each family does."""
    model.set_attn_implementation("eager")
    config = model.config
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    seen: dict[tuple[str, int], Tensor] = {}
    handles = []

    def listen(module: torch.nn.Module, note: Any) -> None:
        handles.append(module.register_forward_hook(lambda module, args, output: note(args[0][0], output[0])))

    def split(layer: int, value: Tensor) -> None:
        """[t, 3 h d]: GPT-2 has all queries first, GPT-NeoX the three of each head together."""
        if config.model_type == "gpt2":
            parts = [part.view(-1, heads, width) for part in value.chunk(3, dim=-1)]
        else:
            parts = list(value.view(-1, heads, 3 * width).chunk(3, dim=-1))
        seen.update({(site, layer): part for site, part in zip("qkv", parts, strict=True)})

    for layer in range(config.num_hidden_layers):
        attention = next(
            m
            for n, m in model.named_modules()
            if n.endswith((f"{layer}.self_attn", f"{layer}.attn", f"{layer}.attention"))
        )
        parts = dict(attention.named_children())
        for site in "qkv":
            if module := parts.get(f"{site}_proj"):
                listen(module, lambda _, out, at=(site, layer): seen.update({at: out.unflatten(-1, (-1, width))}))
        if joint := parts.get("c_attn", parts.get("query_key_value")):
            listen(joint, lambda _, out, layer=layer: split(layer, out))
        output = next(parts[name] for name in _OUTPUTS if name in parts)
        listen(output, lambda into, _, layer=layer: seen.update({("z", layer): into.unflatten(-1, (-1, width))}))
    with torch.inference_mode():
        out = model(torch.tensor([list(token_ids)]), use_cache=False, output_attentions=True)
    for handle in handles:
        handle.remove()
    return seen | {("pattern", layer): pattern[0] for layer, pattern in enumerate(out.attentions)}


def chain_losses_slowly(
    module: HeadModule, token_ids: Tensor, states: Tensor, probs: Tensor, first: int, chain: int
) -> list[list[Tensor]]:
    """Losses of one text by step of the chains, in nats: each chain alone, without a cache, and for each of its tokens
    one causal forward over all rows before.

    token_ids: [t + 1].  states: [t, l, m].  probs: [t, v], the target's over the head's vocabulary, after each
    position.  first: the first position after which a token was generated.
    """
    losses: list[list[Tensor]] = [[] for _ in range(chain)]
    length = len(states)
    for i in range(length):
        given = list(module.entering(states[: i + 1]))
        for k in range(min(chain, length - 1 - i)):
            module.given = torch.stack(given)[None]
            residual = module.residual(token_ids[None, 1 : i + 2 + k])[0, -1]
            module.given = None
            if i + 1 + k >= first:
                logits = module.lm_head(module.model.norm(residual))
                losses[k].append(-(probs[i + 1 + k] * logits.log_softmax(-1)).sum())
            given.append(module.fed_back(residual))
    return losses
