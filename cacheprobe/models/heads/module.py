"""Defines HeadModule, the base class of draft heads as transformers models: decoders over the target's states."""

from abc import abstractmethod

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from cacheprobe.core.live import LiveModule, ModuleValue


class HeadModule(PreTrainedModel):
    """Runs a draft head's blocks over pairs of a target state and the token after it. Row i holds (state of position i,
    token of position i + 1), and predicts the token of position i + 2.

    A subclass sets `model`, a module with embed_tokens, layers, norm and rotary_emb, and `lm_head`.
    """

    base_model_prefix = "model"
    _supports_sdpa = True
    _supports_attention_backend = True
    model: LiveModule
    lm_head: nn.Linear
    given: Tensor | None = None
    """[b, t, m]: the states of the next forward, from `entering` or `fed_back`; None for a fixed pattern of numbers,
    with which the modules of the states are found."""

    @abstractmethod
    def entering(self, states: Tensor) -> Tensor:
        """Returns what row i is given, [..., m], from the target's states of position i at the head's layers, [..., l,
        m]."""

    @abstractmethod
    def fed_back(self, residual: Tensor) -> Tensor:
        """Returns what the next row is given, [..., m], from the head's own residual stream after its last block."""

    @abstractmethod
    def block_input(self, states: Tensor, embeds: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the residual stream [b, t, m] that enters the first block, and further keyword arguments of every
        block. states: what the rows are given.  embeds: of their tokens."""

    def get_input_embeddings(self) -> nn.Module:
        """Returns the embedding of tokens."""
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        """Returns the unembedding."""
        return self.lm_head

    def residual(
        self,
        input_ids: Tensor,
        attention_mask: "Tensor | dict[str, Tensor] | None" = None,
        position_ids: Tensor | None = None,
        past_key_values: ModuleValue = None,
    ) -> Tensor:
        """Returns the residual stream [b, t, m] after the last block. Without a mask, attention is causal."""
        embeds: Tensor = self.model.embed_tokens(input_ids)
        states = _pattern(embeds) if self.given is None else self.given.to(embeds.dtype)
        if position_ids is None:
            position_ids = torch.arange(embeds.shape[1], device=embeds.device)[None]
        if attention_mask is None:
            least, length = torch.finfo(embeds.dtype).min, embeds.shape[1]
            attention_mask = embeds.new_full((length, length), least).triu(1)[None, None]
        rotations = self.model.rotary_emb(embeds, position_ids)
        stream, named = self.block_input(states, embeds)
        kinds = getattr(self.config, "layer_types", None) or ["full_attention"] * len(self.model.layers)
        for kind, layer in zip(kinds, self.model.layers, strict=False):
            mask = attention_mask[kind] if isinstance(attention_mask, dict) else attention_mask
            stream = layer(
                stream,
                attention_mask=mask,
                position_ids=position_ids,
                position_embeddings=rotations,
                past_key_values=past_key_values,
                **named,
            )
        return stream

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: "Tensor | dict[str, Tensor] | None" = None,
        position_ids: Tensor | None = None,
        past_key_values: ModuleValue = None,
        use_cache: bool | None = None,
    ) -> CausalLMOutputWithPast:
        """Returns the logits [b, t, v] of the rows whose states are in `given`."""
        stream = self.residual(input_ids, attention_mask, position_ids, past_key_values)
        return CausalLMOutputWithPast(logits=self.lm_head(self.model.norm(stream)))


def _pattern(like: Tensor) -> Tensor:
    """Returns a tensor of the shape of `like` whose numbers differ from each other, the same at every call."""
    return torch.arange(like.numel(), device=like.device).sin().view(like.shape).to(like.dtype)
