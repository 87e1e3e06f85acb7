"""Adds Thinking States to a pretrained decoder: T and C join a live Hugging Face model, as copies of its own layers.

Passes, losses, hook points and ThinkingLM are those of ThinkingModel. Every weight, norm, rotation and activation
belongs to the wrapped layers; this file defines only the order of their steps.
"""

from collections.abc import Iterable
from copy import deepcopy

from einops import rearrange
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from cacheprobe.core.live import LiveConfig, LiveModule
from cacheprobe.models.base import ModelError
from cacheprobe.models.hf.hooked import HookPoint
from cacheprobe.models.hf.masks import sliding_window
from cacheprobe.models.thinking.blocks import Block, Memory, attend
from cacheprobe.models.thinking.config import ThinkingConfig
from cacheprobe.models.thinking.model import Compression, ThinkingBlock, ThinkingModel, ThinkingParts


class HFNorm(nn.Module):
    """Computes a norm of a Hugging Face model, and has a hook point on its output."""

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        self.source = source
        self.hook_normalized = HookPoint()

    def forward(self, x: Tensor) -> Tensor:
        """Returns the normalised input [..., m], after the hook."""
        return self.hook_normalized(self.source(x))


class HFAttention(nn.Module):
    """Computes grouped-query attention with the weights of a Hugging Face layer, over the keys and values that a Memory
    supplies. rotary: returns the cosines and sines of positions [b or 1, t]."""

    def __init__(self, source: LiveModule, rotary: nn.Module, layer: int) -> None:
        super().__init__()
        self.source, self.rotary, self.layer = source, rotary, layer
        self.hook_q, self.hook_k, self.hook_v = HookPoint(), HookPoint(), HookPoint()
        self.hook_pattern, self.hook_z = HookPoint(), HookPoint()

    def forward(self, x: Tensor, positions: Tensor, memory: Memory) -> Tensor:
        """Returns the attention output [b, t, m] of x [b, t, m]. memory: receives the new keys and values, and returns
        all keys and values to attend to."""
        source = self.source
        projections = source.q_proj, source.k_proj, source.v_proj
        q, k, v = (rearrange(project(x), "b t (h d) -> b t h d", d=source.head_dim) for project in projections)
        q, k, v = self.hook_q(q), self.hook_k(k), self.hook_v(v)
        if hasattr(source, "q_norm"):
            q, k = source.q_norm(q), source.k_norm(k)
        q, k, v = (rearrange(part, "b t h d -> b h t d") for part in (q, k, v))
        q, k = apply_rotary_pos_emb(q, k, *self.rotary(x, positions))
        z = self.hook_z(attend(q, memory(self.layer, k, v), self.hook_pattern))  # [b, t, h, d]
        return source.o_proj(rearrange(z, "b t h d -> b t (h d)"))

    @property
    def projection(self) -> nn.Linear:
        """Output projection from all heads, side by side, to the residual stream."""
        return self.source.o_proj

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """(number of key and value heads, key width, value width) of the cached keys and values."""
        config, width = self.source.config, self.source.head_dim
        return config.num_key_value_heads, width, width


def hf_block(source: LiveModule, rotary: nn.Module, layer: int) -> Block:
    """Returns a Block around a pre-norm Hugging Face layer of the Llama kind; the weights are shared. layer: the layer
    number that the block passes to its Memory, the function that supplies keys and values; any number if used alone.

    Twin: the layer's own forward, close(1e-5) in float32.
    """
    norms = HFNorm(source.input_layernorm), HFNorm(source.post_attention_layernorm)
    return Block(norms[0], HFAttention(source.self_attn, rotary, layer), norms[1], source.mlp)


KINDS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Pre-norm decoders with rotary positions and a gated MLP, whose layers can be called one by one."""
ROTATIONS = ("default", "linear", "llama3", "yarn")
"""Rotary variants that rotate a position in the same way for every text length."""


class ThinkingPretrained(ThinkingModel):
    """Adds a thinking block (T) and a compression block (C) to a pretrained backbone. The backbone is not copied:
    training changes the caller's model, unless `train_backbone(False)` was called.

    T is a copy of the backbone's last layers (one, as in the paper), final norm and unembedding; C is a copy of the
    backbone's first layer. The copies share no weights with the backbone; the embedding is the backbone's. T and C
    rotate positions like the backbone, from 0.
    Source: Thinking States (arXiv 2602.08332), sections 3 and 4.
    Twin: tests.twins.thinking_pretrained_slowly.read_slowly, thoughts ==, logits close(1e-5) in float32.
    """

    def __init__(self, backbone: LiveModule, config: ThinkingConfig, seed: int = 0) -> None:
        """Adds a thinking block T and a compression block C to `backbone`. config: from `config_of`, or one that agrees
        with the backbone. seed: for learned pooling vectors, if used.

        Raises: ModelError for an unsupported backbone, or a config of another backbone.
        """
        check_backbone(backbone)
        _check_config(backbone, config)
        super().__init__(config, seed, lambda config: _parts_of(backbone, config))
        self.backbone_name = type(backbone).__name__
        if config.thinks and config.pooling == "query":
            self.compression.queries.data = self.compression.queries.data.to(self.embed.weight)
        for weight in self.added_parameters():  # a frozen layer's copy would be frozen too
            weight.requires_grad_(True)

    def __repr__(self) -> str:
        added = sum(weight.numel() for weight in self.added_parameters())
        c = self.config
        return (
            f"ThinkingPretrained({self.backbone_name}, {self.num_parameters:,} parameters, {added:,} of them added, "
            f"{c.n_layers} layers, d_model {c.d_model}, chunk {c.chunk})"
        )

    def added_parameters(self) -> list[nn.Parameter]:
        """Returns a list of the parameters that the backbone does not have: those of the thinking and compression
        blocks, and the first chunk state if learned."""
        added = ("thinking.", "compression.", "first_state")
        return [weight for name, weight in self.named_parameters() if name.startswith(added)]

    def train_backbone(self, is_trained: bool) -> None:
        """Sets whether training changes the backbone and its embedding too (requires_grad), or the added parameters
        only. The paper trains all parts together."""
        added = set(self.added_parameters())
        for weight in self.parameters():
            weight.requires_grad_(is_trained or weight in added)


def config_of(backbone: LiveModule, *, eos_id: int, pad_id: int, chunk: int = 8, **choices: object) -> ThinkingConfig:
    """Returns the ThinkingConfig for adding a thinking block T and a compression block C to `backbone`, a live Hugging
    Face model; the config has the backbone's shapes.

    eos_id: ends a thought and an answer.  pad_id: another token, which no thought contains.  choices: other fields of
    ThinkingConfig. By default l_in is 1, and all blocks but the last are in the loop (l_out = n_layers - 1).
    Raises: ModelError for an unsupported backbone, and for impossible choices.
    """
    check_backbone(backbone)
    shapes = _shapes_of(backbone.config)
    shapes.update(n_ctx=backbone.config.max_position_embeddings, l_out=max(backbone.config.num_hidden_layers - 1, 1))
    config = ThinkingConfig(**{**shapes, "eos_id": eos_id, "pad_id": pad_id, "chunk": chunk, **choices})
    _check_config(backbone, config)
    return config


def check_backbone(backbone: LiveModule) -> None:
    """Checks that a thinking and a compression block can be added to a Hugging Face model: a supported family and
    rotary embedding, no sliding window, no attention dropout. Raises: ModelError otherwise."""
    name = type(backbone).__name__
    if name not in KINDS:
        raise ModelError(f"T and C cannot be added to a {name}; give one of {', '.join(KINDS)}, adapters merged")
    config = backbone.config
    window = sliding_window(config)
    rotation = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if window is not None:
        raise ModelError(f"{name} slides over a window of {window} tokens; set config.sliding_window=None first")
    if rotation not in ROTATIONS:
        raise ModelError(f"{name} turns positions by {rotation!r}; models with {', '.join(ROTATIONS)} are supported")
    if getattr(config, "attention_dropout", 0.0):
        raise ModelError(f"{name} drops {config.attention_dropout} of its attention; set config.attention_dropout=0.0")


def _shapes_of(config: LiveConfig) -> dict[str, LiveConfig]:
    """Returns the fields of a ThinkingConfig that a Hugging Face config determines, as a dictionary."""
    return {
        "d_vocab": config.vocab_size,
        "d_model": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "n_heads": config.num_attention_heads,
        "d_mlp": config.intermediate_size,
        "positions": "rope",
        "rope_theta": float(config.rope_parameters["rope_theta"]),
    }


def _check_config(backbone: LiveModule, config: ThinkingConfig) -> None:
    """Raises: ModelError if a ThinkingConfig does not fit its backbone."""
    for field, wanted in _shapes_of(backbone.config).items():
        if (given := getattr(config, field)) != wanted:
            raise ModelError(f"{field} is {wanted!r} in {type(backbone).__name__} and {given!r} in the config")
    if config.thinking_layers > config.n_layers:
        raise ModelError(f"T copies the last layers, 1 to {config.n_layers} of them, not {config.thinking_layers}")


def _parts_of(backbone: LiveModule, config: ThinkingConfig) -> ThinkingParts:
    """Returns the ThinkingParts of a ThinkingPretrained: the backbone's own modules, and a thinking and a compression
    block copied from the backbone (both None without thoughts)."""
    decoder = backbone.model

    def wrapped(layers: Iterable[LiveModule]) -> nn.ModuleList:
        """Returns an nn.ModuleList of Blocks around Hugging Face layers, numbered from 0."""
        return nn.ModuleList([hf_block(layer, decoder.rotary_emb, i) for i, layer in enumerate(layers)])

    thinking, compression = None, None
    if config.thinks:
        last = [deepcopy(layer) for layer in decoder.layers[-config.thinking_layers :]]
        thinking = ThinkingBlock(config, wrapped(last), HFNorm(deepcopy(decoder.norm)), deepcopy(backbone.lm_head))
        compression = Compression(config, hf_block(deepcopy(decoder.layers[0]), decoder.rotary_emb, 0))
    return ThinkingParts(
        decoder.embed_tokens, wrapped(decoder.layers), HFNorm(decoder.norm), backbone.lm_head, thinking, compression
    )
