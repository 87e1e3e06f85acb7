"""Defines and checks the settings of a dictionary's training, before any run is loaded."""

from dataclasses import asdict, dataclass, field

from cacheprobe.core.hook_names import SITES
from cacheprobe.core.values import NO_FLAG, Json, require_settings


@dataclass(frozen=True)
class DictionarySettings:
    """Holds the settings of a topk dictionary's training. The docstrings of the fields are the help of `cacheprobe
    train dictionary`.

    Source: Gao et al. 2024 (arXiv 2406.04093), section 2.3 and appendix A: the topk activation, a decoder of rows of
    norm 1 at first, whose transpose is the encoder. Without its loss for features that are never active.
    """

    site: str = "S"
    """Site of the states: S, T or C."""
    layer: int = 0
    """Layer of the states."""
    features: int = 512
    """Number of features."""
    k: int = 16
    """Features of a state that are kept."""
    steps: int = 1000
    """Steps of the training."""
    batch: int = 256
    """States in a step, drawn anew."""
    learning_rate: float = 1e-3
    """Learning rate of the first step; falls to zero."""
    max_grad_norm: float = field(default=1.0, metadata=NO_FLAG)
    held_out: float = 0.1
    """Share of the states that are never trained on, to measure the variance explained."""
    include_special: bool = False
    """Also train and measure on special tokens and the first position of a text, whose states are far longer."""
    seed: int = 0
    """Seed of the weights and of the order of the states."""

    def __post_init__(self) -> None:
        require_settings(self, ("features", "k", "steps", "batch", "learning_rate", "max_grad_norm", "held_out"))
        if self.site not in SITES:
            raise ValueError(f"unknown site {self.site!r:.60} to train on; sites are {', '.join(SITES)}")
        if self.k > self.features:
            raise ValueError(f"k must be at most the number of features, {self.features}, got {self.k}")
        if not self.held_out < 1:
            raise ValueError(f"held_out is a share and must be below 1, got {self.held_out}")

    def learning_rate_at(self, step: int) -> float:
        """Returns the learning rate of step number `step`, from 0: falls linearly to zero."""
        return self.learning_rate * (1 - step / self.steps)

    def as_dict(self) -> dict[str, Json]:
        """Returns the settings as a dictionary, by field name."""
        return asdict(self)
