"""Defines Eagle3Module, an EAGLE-3 draft head: one block, rarely more, over target states joined with embeddings."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding

from cacheprobe.core.live import LiveConfig, LiveModule, ModuleValue
from cacheprobe.models.heads.module import HeadModule

_PARTS: dict[str, tuple[LiveModule, ...]] = {
    "llama": (LlamaConfig, LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding),
    "qwen3": (Qwen3Config, Qwen3Attention, Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding),
}
SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Settings of a head that are True or False; see `eagle3_config`."""
_FREE_LENGTH = ("default", "linear", "llama3")
"""Kinds of rotary embedding that do not depend on `max_position_embeddings`."""


def eagle3_config(
    block: Mapping[str, object], settings: Mapping[str, object], num_states: int, width: int, length: int
) -> PreTrainedConfig:
    """Returns the config of an Eagle3Module.

    block: fields of a LlamaConfig or Qwen3Config, as `model_type` says.  settings: draft_vocab_size (default: the whole
    vocabulary), and the switches, False by default. norm_before_residual: the residual stream begins with the state
    after `hidden_norm`. norm_before_fc: one norm over the joined target states. fc_norm: one norm for each of them.
    norm_output: a chain feeds the state after the last norm (EAGLE-3.1).
    num_states, width: number and width of the target states of a row.  length: the target's context in tokens, to which
    a rotary embedding without limit is extended, as vLLM does.
    Raises: ValueError for another kind of block, sliding attention, or norm_before_fc together with fc_norm.
    """
    kind = block.get("model_type", "llama")
    if kind not in _PARTS:
        raise ValueError(f"its blocks are of model_type {kind!r:.40}, EAGLE-3 heads here are of {' or '.join(_PARTS)}")
    skipped = ("model_type", "architectures", "auto_map", *SWITCHES)
    config: LiveConfig = _PARTS[str(kind)][0](**{name: one for name, one in block.items() if name not in skipped})
    if "sliding_attention" in (config.layer_types if hasattr(config, "layer_types") else None or ()):
        raise ValueError("it has sliding attention, which EAGLE-3 heads here lack; use one with full attention")
    for name in SWITCHES:
        setattr(config, name, bool(settings.get(name, False)))
    if config.norm_before_fc and config.fc_norm:
        raise ValueError("it has both norm_before_fc and fc_norm, which exclude each other; set one to false")
    if config.rope_parameters.get("rope_type", "default") in _FREE_LENGTH:
        config.max_position_embeddings = max(config.max_position_embeddings, length)
    config.draft_vocab_size = settings.get("draft_vocab_size") or config.vocab_size
    config.num_target_states, config.target_hidden_size = num_states, width
    config.tie_word_embeddings = False
    return config


class Eagle3Module(HeadModule):
    """Runs an EAGLE-3 head. `fc` maps the joined target states of a row to one state; the first block attends over
    [embedding of the token, this state], each after a norm, and adds to the state before its norm.

    Source: EAGLE-3, Li et al. 2025 (arXiv 2503.01840); the switches of speculators 0.9.0.
    Twin: speculators' Eagle3DraftModel, close(1e-5) in float32.
    """

    config_class = PreTrainedConfig

    def __init__(self, config: LiveConfig) -> None:
        """config: from `eagle3_config`."""
        super().__init__(config)
        norm, m = _PARTS[config.model_type][3], config.target_hidden_size
        joined = config.num_target_states * m
        self.model = _Eagle3Decoder(config)
        self.input_norm = norm(joined, eps=config.rms_norm_eps) if config.norm_before_fc else None
        norms = (norm(m, eps=config.rms_norm_eps) for _ in range(config.num_target_states))
        self.fc_norm = nn.ModuleList(norms) if config.fc_norm else None
        self.fc = nn.Linear(joined, config.hidden_size, bias=False)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.post_init()

    def entering(self, states: Tensor) -> Tensor:
        """Returns fc of the joined states [..., m], after the norms that the head has before it."""
        if self.fc_norm is not None:
            normed = (norm(states[..., i, :]) for i, norm in enumerate(self.fc_norm))
            states = torch.stack([*normed], dim=-2)
        joined = states.flatten(-2)
        return self.fc(joined if self.input_norm is None else self.input_norm(joined))

    def fed_back(self, residual: Tensor) -> Tensor:
        """Returns the residual stream unchanged, or after the last norm with `norm_output`."""
        return self.model.norm(residual) if self.config.norm_output else residual

    def block_input(self, states: Tensor, embeds: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the states, after `hidden_norm` with `norm_before_residual`; and the embeddings, for the first
        block."""
        is_normed = self.config.norm_before_residual
        return self.model.layers[0].hidden_norm(states) if is_normed else states, {"embeds": embeds}


class _Eagle3Decoder(nn.Module):
    """Holds the embedding, the blocks, the last norm and the rotary embedding."""

    def __init__(self, config: LiveConfig) -> None:
        super().__init__()
        _, _, _, norm, rotary = _PARTS[config.model_type]
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_Eagle3Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = norm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = rotary(config)


class _Eagle3Block(nn.Module):
    """Runs one block. The first attends over embeddings joined with states, further ones over states alone."""

    def __init__(self, config: LiveConfig, layer: int) -> None:
        super().__init__()
        _, attention, mlp, norm, _ = _PARTS[config.model_type]
        m, self.is_first, self.takes_normed = config.hidden_size, layer == 0, config.norm_before_residual
        self.self_attn = attention(config, layer)
        self.mlp = mlp(config)
        self.input_layernorm, self.post_attention_layernorm = (norm(m, eps=config.rms_norm_eps) for _ in range(2))
        if self.is_first:
            self.hidden_norm = norm(m, eps=config.rms_norm_eps)
            for name in ("q_proj", "k_proj", "v_proj"):
                narrow = self.self_attn.get_submodule(name)
                wide = nn.Linear(2 * m, narrow.out_features, bias=narrow.bias is not None)
                self.self_attn.set_submodule(name, wide)

    def forward(self, hidden_states: Tensor, embeds: Tensor, **named: ModuleValue) -> Tensor:
        """Returns the residual stream [b, t, m] after the block."""
        if self.is_first:
            states = hidden_states if self.takes_normed else self.hidden_norm(hidden_states)
            seen = torch.cat([self.input_layernorm(embeds), states], dim=-1)
        else:
            seen = self.input_layernorm(hidden_states)
        hidden_states = hidden_states + self.self_attn(seen, **named)[0]
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
