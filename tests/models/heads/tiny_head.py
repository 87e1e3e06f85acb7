"""A draft head for tiny models: often right, and not always."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from cacheprobe.engine.drafters.chain import ChainDrafter
from cacheprobe.models.base import CachedLM
from cacheprobe.models.heads.lm import HeadLM
from cacheprobe.models.heads.module import HeadModule
from tests.tiny import hf_model

SITES = (("S", 0), ("S", 2))
"""Of the tiny model: the states that the head reads."""


class TinyHead(HeadModule):
    """A llama over the sum of a token's embedding and of a share of the given states."""

    config_class = LlamaConfig

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        llama = LlamaForCausalLM(config)
        self.model, self.lm_head = llama.model, llama.lm_head
        self.join = nn.Linear(len(SITES) * config.hidden_size, config.hidden_size, bias=False)
        self.post_init()

    def entering(self, states: Tensor) -> Tensor:
        return self.join(states.flatten(-2))

    def fed_back(self, residual: Tensor) -> Tensor:
        return residual

    def block_input(self, states: Tensor, embeds: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return embeds + states / 500, {}


@dataclass(frozen=True, eq=False)
class TinyHeadDrafter(ChainDrafter):
    """Drafts for `tests.tiny.loaded()` with a TinyHead that has the model's weights, moved a little. It sees all of the
    text but the first token."""

    name: ClassVar[str] = "tiny-head"
    length: int = 3
    scale: float = 0.01

    @torch.inference_mode(False)  # other tests need gradients
    def bind(self, model: CachedLM) -> HeadLM:
        target = hf_model()
        head = TinyHead(target.config).eval()
        head.load_state_dict(target.state_dict(), strict=False)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for weight in head.parameters():
                weight += self.scale * torch.randn(weight.shape, generator=generator)
        return HeadLM(head, model, "tiny-head", SITES)
