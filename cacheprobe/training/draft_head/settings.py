"""Defines and checks the settings of a draft head's training, before any run is loaded."""

from dataclasses import asdict, dataclass, field

from cacheprobe.core.values import NO_FLAG, Json, require_settings


@dataclass(frozen=True)
class DraftHeadSettings:
    """Holds the settings of a draft head's training. The docstrings of the fields are the help of `cacheprobe train
    draft-head`.

    Source: EAGLE, Li et al. 2024 (arXiv 2401.15077), section 3.2: smooth L1 between states, plus 0.1 times the cross
    entropy of the tokens, with noise on the states.
    """

    hidden: int = 256
    """Width of the MLP block."""
    steps: int = 1000
    """Steps of the training."""
    batch: int = 128
    """Tokens in a step, drawn anew."""
    learning_rate: float = 1e-3
    """Learning rate of the first step; falls to zero."""
    noise: float = 0.1
    """Largest noise on a state, in standard deviations."""
    token_weight: float = 0.1
    """Weight of the cross entropy."""
    max_grad_norm: float = field(default=1.0, metadata=NO_FLAG)
    held_out: float = 0.2
    """Share of the requests that are never trained on."""
    seed: int = 0
    """Seed of the weights and of the order of the tokens."""

    def __post_init__(self) -> None:
        above_zero = ("hidden", "steps", "batch", "learning_rate", "noise", "token_weight", "max_grad_norm", "held_out")
        require_settings(self, above_zero)
        if not self.held_out < 1:
            raise ValueError(f"held_out is a share and must be below 1, got {self.held_out}")

    def learning_rate_at(self, step: int) -> float:
        """Returns the learning rate of step number `step`, from 0: falls linearly to zero."""
        return self.learning_rate * (1 - step / self.steps)

    def as_dict(self) -> dict[str, Json]:
        """Returns the settings as a dictionary, by field name."""
        return asdict(self)
