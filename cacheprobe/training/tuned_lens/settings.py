"""Defines and checks the settings of a tuned lens's training, before any model is loaded."""

from dataclasses import asdict, dataclass, field

from cacheprobe.core.values import NO_FLAG, Json, require_settings


@dataclass(frozen=True)
class TunedLensSettings:
    """Holds the settings of a tuned lens's training.

    The docstrings of the fields are the help of `cacheprobe train tuned-lens`. By default a step reads fewer tokens
    than in PyPI's tuned-lens.
    Source: Belrose et al. 2023 (arXiv 2303.08112), section 3, and the defaults of its tuned-lens package: Nesterov
    momentum, learning rate 1 times (1 - momentum) falling linearly to zero over 250 steps, gradients clipped to norm 1,
    weight decay towards the identity. A step of the package reads 262144 tokens of The Pile.
    """

    steps: int = 250
    """Steps of the training."""
    texts: int = 4
    """Texts in a step; every step reads new ones."""
    length: int = 64
    """Tokens in a text: a task's prompt, followed by the model's own continuation."""
    learning_rate: float = 1.0
    """Learning rate of the first step, before momentum; falls to zero."""
    momentum: float = field(default=0.9, metadata=NO_FLAG)
    weight_decay: float = field(default=1e-3, metadata=NO_FLAG)
    max_grad_norm: float = field(default=1.0, metadata=NO_FLAG)
    held_out: int = 16
    """Number of texts that are never trained on, for the comparison of the two lenses."""
    seed: int = 0
    """Seed of the texts."""

    def __post_init__(self) -> None:
        require_settings(self, ("steps", "texts", "length", "learning_rate", "max_grad_norm", "held_out"))
        if self.length < 2:
            raise ValueError(f"length must be at least 2: a prompt's token and one more, got {self.length}")
        if not self.momentum < 1:
            raise ValueError(f"momentum must be below 1, got {self.momentum}")

    def learning_rate_at(self, step: int) -> float:
        """Returns the learning rate for PyTorch's optimizer at step number `step`, from 0: `learning_rate` times (1 -
        momentum), falling linearly to zero."""
        return self.learning_rate * (1 - self.momentum) * (1 - step / self.steps)

    def as_dict(self) -> dict[str, Json]:
        """Returns the settings as a dictionary, by field name."""
        return asdict(self)
