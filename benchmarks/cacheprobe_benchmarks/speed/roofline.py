"""The least time that a job's passes can take on a machine: multiplications and bytes at the best measured rates."""

from collections.abc import Sequence
from dataclasses import dataclass

from cacheprobe.models.base import CachedLM
from cacheprobe_benchmarks.speed.products import Rates


@dataclass(frozen=True)
class Roofline:
    """Computes the seconds of passes of a model at the Rates of a machine. A pass takes the longer of its
    multiplications and of reading the weights that it uses once; caches, norms, attention and records count nothing."""

    block_weights: int
    """Numbers in the weight matrices of all blocks."""
    head_weights: int
    """Numbers in the unembedding."""
    bytes_per_weight: int
    rates: Rates

    @classmethod
    def of(cls, model: CachedLM, rates: Rates) -> "Roofline":
        """Returns the Roofline of a Hugging Face model."""
        plain = model.live
        head = model.unembedding
        inner = sum(part.numel() for name, part in plain.named_parameters() if part.ndim == 2 and "embed" not in name)
        inner -= sum(part.numel() for name, part in plain.named_parameters() if "lm_head" in name)
        return cls(inner, head.numel(), head.element_size(), rates)

    def seconds(self, blocks: Sequence[int], heads: Sequence[int]) -> float:
        """Returns the seconds of passes that feed the blocks, and the unembedding, so many rows each."""
        return sum(self._pass(self.block_weights, rows) for rows in blocks) + sum(
            self._pass(self.head_weights, rows) for rows in heads
        )

    def _pass(self, weights: int, rows: int) -> float:
        multiplying = 2e-9 * weights * rows / self.rates.best_gflops
        return max(multiplying, 1e-9 * weights * self.bytes_per_weight / self.rates.copy_gb_per_second)
