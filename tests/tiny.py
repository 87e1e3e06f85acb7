"""Real architectures with random weights, scaled so that outputs vary: small enough to run in milliseconds."""

import copy
from functools import cache

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import cacheprobe as cp
from cacheprobe.models.bridge import BridgeLM

VOCAB = 97
_SHAPE = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4)
_NO_SPECIALS = dict(eos_token_id=None, bos_token_id=None, pad_token_id=None)
_COMMON = dict(initializer_range=0.3, **_NO_SPECIALS)

FAMILIES = ("llama", "qwen2", "gpt2", "gpt-neox", "mistral")


def hf_model(family: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """A fresh three-layer model, in eval mode."""
    torch.manual_seed(seed)
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**_SHAPE, **_COMMON, num_key_value_heads=2))
    elif family == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**_SHAPE, **_COMMON, num_key_value_heads=2, use_sliding_window=False))
    elif family == "mistral":
        model = MistralForCausalLM(MistralConfig(**_SHAPE, **_COMMON, num_key_value_heads=2, sliding_window=None))
    elif family == "gpt-neox":
        model = GPTNeoXForCausalLM(GPTNeoXConfig(**_SHAPE, **_COMMON))
    else:
        config = GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=3, n_head=4, n_positions=128, **_COMMON)
        model = GPT2LMHeadModel(config)
    model.generation_config.eos_token_id = None
    return model.to(dtype).eval()


@cache
def loaded(family: str = "llama", dtype: torch.dtype = torch.float32) -> BridgeLM:
    """The same weights as `hf_model`, behind our loader."""
    return cp.load_model(hf_model(family, dtype))


def perturbed(model: BridgeLM, scale: float, seed: int = 1) -> BridgeLM:
    """A copy of a tiny model whose weights were moved a little: agrees often, and not always."""
    live = copy.deepcopy(hf_model("llama", model.dtype))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in live.parameters():
            weight += scale * torch.randn(weight.shape, generator=generator, dtype=torch.float32).to(weight.dtype)
    return cp.load_model(live)


PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9], [3] * 40, [11, 12], [50, 51, 52, 53, 54, 55, 56]]
SMALL = dict(window=4, group=2, capacity=96, max_new_tokens=20, progress=False)
