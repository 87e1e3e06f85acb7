"""Lists settings of attention, head and cache in which families differ, each as a tiny config for the table."""

from collections.abc import Mapping
from typing import NamedTuple

from tests.field.tiny_family import Fields


class Variant(NamedTuple):
    """Holds a family and the fields of its config that switch a setting on."""

    family: str
    fields: Fields
    quantised: str = ""
    """Format of the weights, one of `quantised.WRITERS`; "" for dense weights."""


_QUANTISED = (
    *("GGUF Q4_1", "GGUF Q8_0", "bitsandbytes nf4", "bitsandbytes int8", "torchao int8", "torchao int4"),
    *("compressed-tensors int4", "compressed-tensors int8", "compressed-tensors float8"),
)

VARIANTS: Mapping[str, Variant] = {
    "sliding window": Variant("mistral", dict(sliding_window=8)),
    "sliding and full layers": Variant("gemma3_text", {}),
    "chunked attention": Variant("llama4_text", {}),
    "attention sinks": Variant("gpt_oss", {}),
    "ALiBi added to scores": Variant("bloom", {}),
    "ALiBi from distances": Variant("mpt", {}),
    "ALiBi in the mask": Variant("falcon", dict(alibi=True)),
    "partial rotary": Variant("phi", dict(partial_rotary_factor=0.5)),
    "no rotary in some layers": Variant("smollm3", {}),
    "tied head": Variant("llama", dict(tie_word_embeddings=True)),
    "untied head": Variant("llama", dict(tie_word_embeddings=False)),
    "capped scores and logits": Variant("gemma2", dict(attn_logit_softcapping=5.0, final_logit_softcapping=5.0)),
    "scaled logits and stream": Variant("granite", {}),
    "latent attention (MLA)": Variant("deepseek_v3", {}),
    "parallel attention and MLP": Variant("gptj", {}),
    "norms on the stream": Variant("bert", {}),
    "keys shared across layers": Variant("gemma4_text", dict(num_kv_shared_layers=2)),
    "head counts per layer": Variant("laguna", dict(num_attention_heads_per_layer=[4, 2, 4, 2])),
    **{f"quantised: {name}": Variant("llama", dict(intermediate_size=64), name) for name in _QUANTISED},
}
"""Name of a setting -> a family that has it."""
