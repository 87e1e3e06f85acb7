"""Real architectures with random weights, scaled so that outputs vary: small enough to run in milliseconds.

For proofs and tests: a mock could not be wrong in the ways that a model can.
"""

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

VOCAB = 97
_SHAPE = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4)
_NO_SPECIALS = dict(eos_token_id=None, bos_token_id=None, pad_token_id=None)
_COMMON = dict(initializer_range=0.3, **_NO_SPECIALS)
_GROUPED = dict(num_key_value_heads=2)
_GEMMA = dict(**_GROUPED, head_dim=8, query_pre_attn_scalar=8)

_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {  # class name without its ending, and settings
    "llama": ("Llama", _GROUPED),
    "llama-tied": ("Llama", dict(**_GROUPED, tie_word_embeddings=True)),
    "qwen2": ("Qwen2", dict(**_GROUPED, use_sliding_window=False)),
    "qwen3": ("Qwen3", dict(**_GROUPED, head_dim=8)),
    "gpt2": ("GPT2", {}),
    "gpt-neox": ("GPTNeoX", {}),
    "phi": ("Phi", {}),
    "olmo2": ("Olmo2", _GROUPED),
    "mistral": ("Mistral", dict(**_GROUPED, sliding_window=None)),
    "gemma2": ("Gemma2", dict(**_GEMMA, attn_logit_softcapping=5.0, final_logit_softcapping=5.0)),
    "gemma3": ("Gemma3", _GEMMA),
}
FAMILIES = tuple(_FAMILIES)

_WINDOWED: dict[str, dict[str, Any]] = {  # every kind of layer list: all slide, the last ones, every second one
    "mistral": {},
    "qwen2": dict(use_sliding_window=True, max_window_layers=1),
    "qwen3": dict(use_sliding_window=True, max_window_layers=2),
    "gemma2": {},
    "gemma3": dict(sliding_window_pattern=2),
}
SLIDING = tuple(_WINDOWED)


def tiny_model(
    family: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0, window: int | None = None
) -> PreTrainedModel:
    """A fresh three-layer model, in eval mode. window: width of the sliding layers, for the families that have them."""
    name, settings = _FAMILIES[family]
    if family == "gpt2":
        shape = dict(vocab_size=VOCAB, n_embd=32, n_layer=3, n_head=4, n_positions=128)
    else:
        shape = _SHAPE
    if window is not None:
        settings = {**settings, **_WINDOWED[family], "sliding_window": window}
    config_name = {"gemma3": "Gemma3TextConfig"}.get(family, f"{name}Config")
    config = getattr(transformers, config_name)(**shape, **_COMMON, **settings)
    torch.manual_seed(seed)
    model = getattr(transformers, "GPT2LMHeadModel" if family == "gpt2" else f"{name}ForCausalLM")(config)
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if "gemma" in family and "post_" in path:  # 1 + weight; at zero the scaled embedding would drown all blocks
                weight.normal_(2.0, 0.5)
    return model.to(dtype).eval()
