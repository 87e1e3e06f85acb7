"""The thought lens: what a Thinking States model would have thought, had T read another layer."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cacheprobe.lenses.base import LensError


class ReadThoughts(NamedTuple):
    """What T says of n chunks."""

    token_ids: Int[Tensor, "n r"]
    """Greedily decoded; behind its end a thought is padded."""
    first_logits: Float[Tensor, "n v"]
    """Of each thought's first token."""


@dataclass(frozen=True)
class ThoughtLens:
    """T's own head over a chunk's residual stream after any block; after block l_out - 1 it is the thought itself.

    It reads chunks and not single vectors, so it stands beside the lenses of the registry.
    Source: the logit lens's question put to the thinking block of Thinking States (arXiv 2602.08332), Eq. 4.
    """

    name: ClassVar[str] = "thought"

    def check(self, model: Any) -> None:
        """Raises: LensError for a model that writes no thoughts."""
        if not getattr(getattr(model, "config", None), "thinks", False):
            raise LensError(
                f"the thought lens reads Thinking States models, {getattr(model, 'name', model)} writes no thoughts; "
                'load one, such as cp.load_model("coinflip-thinking")'
            )

    @torch.inference_mode()
    def read(self, model: Any, chunks: Float[Tensor, "n c m"]) -> ReadThoughts:
        """Thoughts of chunks [n, c, m], all layers' in one batch, each token of a thought in one pass of T.

        Twin: tests.lenses_slowly.thought_slowly, a chunk alone, without pads: tokens ==, logits close(1e-5).
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
            best = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)  # of equal ones the lowest id
            ids[is_open, i] = best[is_open]
            is_open &= best != config.eos_id
            if not bool(is_open.any()):
                break
        return ReadThoughts(ids, first)
