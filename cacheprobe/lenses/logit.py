"""Defines LogitLens, which reads a state as if it were the model's last residual stream."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float, Int
from torch import Tensor

from cacheprobe.core.registry import register
from cacheprobe.models.base import CachedLM


@register("lenses", "logit")
@dataclass(frozen=True)
class LogitLens:
    """Reads a state of any layer with the model's own final norm and unembedding.

    T and C are read as if they were the residual stream.
    Source: nostalgebraist 2020, "interpreting GPT: the logit lens".
    Twin: transformer_lens.tools.analysis.logit_lens (S) and logit_readout (T, C), close(1e-5) in float32.
    """

    name: ClassVar[str] = "logit"
    sites: ClassVar[tuple[str, ...]] = ("S", "T", "C")

    @classmethod
    def fresh(cls, model: CachedLM) -> "LogitLens":
        """Returns a LogitLens, which has no parameters to train."""
        return cls()

    def check(self, model: CachedLM) -> None:
        """Accepts every model: a logit lens has no parameters."""

    def to_residual(self, states: Float[Tensor, "n m"], layers: Int[Tensor, "n"]) -> Float[Tensor, "n m"]:
        """Returns the states, which are read as residual streams as they are."""
        return states

    def logits(self, model: CachedLM, states: Float[Tensor, "n m"], layers: Int[Tensor, "n"]) -> Float[Tensor, "n v"]:
        """Returns logits [n, v] of states [n, m]. The argument `layers` has no effect."""
        return model.read_out(self.to_residual(states, layers))
