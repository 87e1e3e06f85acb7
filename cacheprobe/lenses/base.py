"""What every lens offers."""

from typing import ClassVar, Protocol, runtime_checkable

from torch import Tensor

from cacheprobe.models.base import CachedLM


@runtime_checkable
class Lens(Protocol):
    """Reads states [n, m] of any layers as logits [n, v] in the model's own dtype."""

    name: ClassVar[str]

    def logits(self, model: CachedLM, states: Tensor, layers: Tensor) -> Tensor:
        """states: [n, m], one vector a row; layers: [n], the block after which each stood. Returns [n, v]."""
        ...
