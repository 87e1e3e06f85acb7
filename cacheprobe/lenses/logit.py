"""The logit lens: what the model would say if it stopped here."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float, Int
from torch import Tensor

from cacheprobe.core.registry import register
from cacheprobe.models.base import CachedLM


@register("lenses", "logit")
@dataclass(frozen=True)
class LogitLens:
    """Any layer's residual stream through the model's own final norm and unembedding.

    It has no numbers of its own, so it fits every model; T and C are read as if they were the stream.
    Source: nostalgebraist 2020, "interpreting GPT: the logit lens".
    Twin: transformer_lens.tools.analysis.logit_lens (S) and logit_readout (T, C), close(1e-5) in float32.
    """

    name: ClassVar[str] = "logit"
    sites: ClassVar[tuple[str, ...]] = ("S", "T", "C")

    @classmethod
    def fresh(cls, model: CachedLM) -> "LogitLens":
        """See Lens.fresh."""
        return cls()

    def check(self, model: CachedLM) -> None:
        """See Lens.check: whatever model reads, it reads through its own unembedding."""

    def logits(self, model: CachedLM, states: Float[Tensor, "n m"], layers: Int[Tensor, "n"]) -> Float[Tensor, "n v"]:
        """Logits [n, v] of states [n, m]; the layer does not matter to this lens."""
        return model.read_out(states)
