"""Builds transformers models of real architectures with small random weights, which run in milliseconds, for stress
runs and tests.

A real architecture can have faults that a mock cannot have. The weights are scaled so that outputs vary.
"""

from dataclasses import dataclass
from typing import cast

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Size:
    """Holds the dimensions of a tiny model, and the standard deviation of its random weights."""

    vocab: int
    hidden: int
    mlp: int
    layers: int
    heads: int
    initializer_range: float
    has_near_ties: bool = False
    """If True, every second token's unembedding equals its neighbour's except for the last bits, so the best two logits
    nearly tie."""


VOCAB = 97
TINY = Size(VOCAB, hidden=32, mlp=48, layers=3, heads=4, initializer_range=0.3)
NEAR_TIES = Size(256, hidden=128, mlp=256, layers=3, heads=4, initializer_range=0.3, has_near_ties=True)
"""In float32, the summation order changes the last bits of most logits; with this size it also changes the chosen
tokens."""
WIDE = Size(1020, hidden=256, mlp=1024, layers=4, heads=2, initializer_range=0.3, has_near_ties=True)
"""Wide and deep enough that the summation order also changes results in 16 bits."""

_Fields = dict[str, int | float | None]
"""Fields of a transformers config."""

_GROUPED: _Fields = dict(num_key_value_heads=2)

_FAMILIES: dict[str, tuple[str, _Fields]] = {  # class name without its ending, and settings
    "llama": ("Llama", _GROUPED),
    "llama-tied": ("Llama", dict(**_GROUPED, tie_word_embeddings=True)),
    "qwen2": ("Qwen2", dict(**_GROUPED, use_sliding_window=False)),
    "qwen3": ("Qwen3", _GROUPED),
    "gpt2": ("GPT2", {}),
    "gpt-neox": ("GPTNeoX", {}),
    "phi": ("Phi", {}),
    "olmo2": ("Olmo2", _GROUPED),
    "mistral": ("Mistral", dict(**_GROUPED, sliding_window=None)),
    "gemma2": ("Gemma2", dict(**_GROUPED, attn_logit_softcapping=5.0, final_logit_softcapping=5.0)),
    "gemma3": ("Gemma3", _GROUPED),
}
FAMILIES = tuple(_FAMILIES)

_WINDOWED: dict[str, _Fields] = {  # every kind of layer list: all slide, the last ones, every second one
    "mistral": {},
    "qwen2": dict(use_sliding_window=True, max_window_layers=1),
    "qwen3": dict(use_sliding_window=True, max_window_layers=2),
    "gemma2": {},
    "gemma3": dict(sliding_window_pattern=2),
}
SLIDING = tuple(_WINDOWED)


def tiny_model(
    family: str = "llama",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    window: int | None = None,
    size: Size = TINY,
) -> PreTrainedModel:
    """Returns a transformers model with small random weights, in eval mode. Sets torch's global random seed. family:
    one of FAMILIES, such as "llama". window: width in tokens of the sliding layers, for families that have such
    layers."""
    name, settings = _FAMILIES[family]
    settings = {**_shape(family, size), **settings}
    if window is not None:
        settings |= {**_WINDOWED[family], "sliding_window": window}
    specials = dict(eos_token_id=None, bos_token_id=None, pad_token_id=None)
    config_name = {"gemma3": "Gemma3TextConfig"}.get(family, f"{name}Config")
    config = getattr(transformers, config_name)(**settings, initializer_range=size.initializer_range, **specials)
    torch.manual_seed(seed)
    model = getattr(transformers, "GPT2LMHeadModel" if family == "gpt2" else f"{name}ForCausalLM")(config)
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if "gemma" in family and "post_" in path:  # 1 + weight; at zero the scaled embedding would drown all blocks
                weight.normal_(2.0, 0.5)
    model = model.to(dtype).eval()
    if size.has_near_ties:
        _make_near_ties(model)
    return model


def _make_near_ties(model: PreTrainedModel) -> None:
    """Sets every second token's unembedding to its neighbour's, except for the last bits, in place."""
    with torch.no_grad():
        weight = cast(nn.Embedding, model.get_output_embeddings()).weight
        first = weight[0::2].float() if weight.dtype != torch.float32 else weight[0::2].double()
        steps = torch.randint(-1, 2, first.shape)
        weight[1::2] = (first * (1 + steps * torch.finfo(weight.dtype).eps)).to(weight.dtype)


def _shape(family: str, size: Size) -> _Fields:
    """Returns the config fields of `family` that give the model its dimensions."""
    if family == "gpt2":
        shape = dict(vocab_size=size.vocab, n_embd=size.hidden, n_layer=size.layers, n_head=size.heads)
        return {**shape, "n_positions": 128}
    shape = dict(vocab_size=size.vocab, hidden_size=size.hidden, intermediate_size=size.mlp)
    width = size.hidden // size.heads
    if family == "qwen3" or "gemma" in family:  # their head width is a setting of its own
        shape |= dict(head_dim=width)
    if "gemma" in family:
        shape |= dict(query_pre_attn_scalar=width)
    return {**shape, "num_hidden_layers": size.layers, "num_attention_heads": size.heads}
