"""Settings of a tuned lens's training, checked before loading."""

from dataclasses import asdict, dataclass, fields

from cacheprobe.core.values import Json


@dataclass(frozen=True)
class TunedLensSettings:
    """Everything that a training's result depends on, except the model. The optimizer is the published one; amounts are
    smaller.

    Source: Belrose et al. 2023 (arXiv 2303.08112), section 3, and the defaults of its tuned-lens package: Nesterov
    momentum, learning rate 1 times (1 - momentum) falling linearly to zero over 250 steps, gradients clipped to norm 1,
    weight decay towards the identity. There, a step reads 262144 tokens of The Pile.
    """

    steps: int = 250
    texts: int = 4
    """Texts in a step; every step reads new ones."""
    length: int = 64
    """Tokens in a text: a task's prompt, followed by the model's own continuation."""
    learning_rate: float = 1.0
    momentum: float = 0.9
    weight_decay: float = 1e-3
    max_grad_norm: float = 1.0
    held_out: int = 16
    """Number of texts that are never trained on, for the comparison of the two lenses."""
    seed: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not (whole or (field.type is float and isinstance(value, float))) or not 0 <= value < 2**31:
                kind = "whole number" if field.type is int else "number"
                raise ValueError(f"{field.name} must be a {kind} of at least 0, got {value!r}")
        for name in ("steps", "texts", "length", "learning_rate", "max_grad_norm", "held_out"):
            if not getattr(self, name):
                raise ValueError(f"{name} must be more than 0")
        if self.length < 2:
            raise ValueError(f"length must be at least 2: a prompt's token and one more, got {self.length}")
        if not self.momentum < 1:
            raise ValueError(f"momentum must be below 1, got {self.momentum}")

    def learning_rate_at(self, step: int) -> float:
        """Returns the learning rate of a step, counted from 0, times (1 - momentum): PyTorch's momentum multiplies it
        by the inverse."""
        return self.learning_rate * (1 - self.momentum) * (1 - step / self.steps)

    def as_dict(self) -> dict[str, Json]:
        """Returns the settings as a dictionary."""
        return asdict(self)
