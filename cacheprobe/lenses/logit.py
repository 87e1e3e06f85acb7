"""The logit lens: what the model would say if it stopped here."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float, Int
from torch import Tensor

from cacheprobe.models.base import CachedLM
from cacheprobe.registry import register


@register("lenses", "logit")
@dataclass(frozen=True)
class LogitLens:
    """Any layer's residual stream through the model's own final norm and unembedding.

    Source: nostalgebraist 2020, "interpreting GPT: the logit lens".
    Twin: transformer_lens.tools.analysis.logit_lens, close(1e-5) in float32.
    """

    name: ClassVar[str] = "logit"

    def logits(self, model: CachedLM, states: Float[Tensor, "n m"], layers: Int[Tensor, "n"]) -> Float[Tensor, "n v"]:
        """Logits [n, v] of states [n, m]; the layer does not matter to this lens."""
        return model.read_out(states)
