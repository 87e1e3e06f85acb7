"""Defines ThoughtLens, which computes the thought that a Thinking States model would write from another layer."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cacheprobe.lenses.base import LensError

if TYPE_CHECKING:
    from cacheprobe.models.thinking.lm import ThinkingLM


class ReadThoughts(NamedTuple):
    """Holds the thoughts that a thinking block writes for n chunks of tokens."""

    token_ids: Int[Tensor, "n r"]
    """Token ids of each thought, chosen greedily; pad ids after its end."""
    first_logits: Float[Tensor, "n v"]
    """Logits of each thought's first token."""


@dataclass(frozen=True)
class ThoughtLens:
    """Applies the model's thinking block to the residual stream of a chunk (c tokens) after any layer.

    After layer l_out - 1 the result is the model's own thought. The lens reads whole chunks, not single vectors, so it
    is not in the registry of lenses.
    Source: the idea of the logit lens, applied to the thinking block of Thinking States (arXiv 2602.08332), Eq. 4.
    """

    name: ClassVar[str] = "thought"

    def check(self, model: object) -> None:
        """Raises: LensError for any model but a Thinking States model that writes thoughts."""
        if not getattr(getattr(model, "config", None), "thinks", False):
            raise LensError(
                f"the thought lens reads Thinking States models, {getattr(model, 'name', model)} writes no thoughts; "
                'load one, such as cp.load_model("coinflip-thinking")'
            )

    @torch.inference_mode()
    def read(self, model: "ThinkingLM", chunks: Float[Tensor, "n c m"]) -> ReadThoughts:
        """Returns ReadThoughts of n chunks, each of any layer. chunks: [n, c, m], the residual streams of their tokens.

        Raises: LensError for a model without thoughts, or chunks of another shape.
        Twin: tests.twins.lenses_slowly.thought_slowly, a chunk alone, without pads: tokens ==, logits close(1e-5).
        """
        self.check(model)
        config = model.config
        if chunks.shape[1:] != (config.chunk, config.d_model):
            given = tuple(chunks.shape[1:])
            raise LensError(f"{model.name} thinks about chunks of {(config.chunk, config.d_model)}, got {given}")
        ids = torch.full((len(chunks), config.max_thought), config.pad_id, device=chunks.device)
        is_open = torch.ones(len(chunks), dtype=torch.bool, device=chunks.device)
        first = torch.empty(0)
        for i in range(config.max_thought):
            logits = model.model.think(chunks, ids)[:, i].float()
            first = logits if i == 0 else first
            best = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)  # the lowest id of equal logits
            ids[is_open, i] = best[is_open]
            is_open &= best != config.eos_id
            if not bool(is_open.any()):
                break
        return ReadThoughts(ids, first)
