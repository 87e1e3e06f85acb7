"""Mixtures of experts of real architectures with small random weights."""

from functools import cache
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

import cacheprobe as cp

VOCAB = 97
_SHAPE: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, initializer_range=0.3, eos_token_id=None, bos_token_id=None, pad_token_id=None,
)  # fmt: skip
_LATENT: dict[str, Any] = dict(
    n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, n_shared_experts=1, first_k_dense_replace=1,
    kv_lora_rank=16, q_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, head_dim=8,
    num_key_value_heads=4, n_group=2, topk_group=1,
)  # fmt: skip
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", dict(num_local_experts=6, num_experts_per_tok=2, sliding_window=None)),
    "qwen2-moe": (
        "Qwen2Moe",
        dict(
            num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=40,
            decoder_sparse_step=2,
        ),
    ),
    "qwen3-moe": ("Qwen3Moe", dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, head_dim=8)),
    "olmoe": ("Olmoe", dict(num_experts=6, num_experts_per_tok=3)),
    "gpt-oss": ("GptOss", dict(num_local_experts=6, num_experts_per_tok=2, head_dim=8, sliding_window=8)),
    "deepseek-v2": ("DeepseekV2", dict(**_LATENT, topk_method="group_limited_greedy")),
    "deepseek-v3": ("DeepseekV3", _LATENT),
}  # fmt: skip
FAMILIES = tuple(_FAMILIES)
DENSE = {"qwen2-moe": (0, 2), "deepseek-v2": (0,), "deepseek-v3": (0,)}
"""Layers without experts."""
TOP_K = {family: settings["num_experts_per_tok"] for family, (_, settings) in _FAMILIES.items()}


def plain(family: str, dtype: torch.dtype = torch.float32, **settings: Any) -> PreTrainedModel:
    """A new model each time: `cp.load_model` wraps a live one in place."""
    name, own = _FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**_SHAPE, **own, **settings})
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        for path, weight in [*model.named_parameters(), *model.named_buffers()]:
            if path.endswith(("sinks", "_bias", "router.bias", "correction_bias")):  # zero by default
                weight.normal_(0.0, 0.3)
    return model.to(dtype).eval()


@cache
def loaded(family: str, dtype: torch.dtype = torch.float32) -> Any:
    return cp.load_model(plain(family, dtype))
