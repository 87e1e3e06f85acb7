"""Settings of a LoRA training, checked before loading; and the names that are held out from training."""

from dataclasses import asdict, dataclass, fields
from math import cos, pi

from cacheprobe.tasks.coin_flip import NAMES

HELD_OUT_NAMES = NAMES[3::4]
"""Every fourth name; used in evaluations only."""
TRAIN_NAMES = tuple(name for name in NAMES if name not in HELD_OUT_NAMES)

TASKS = ("coin-flip",)


@dataclass(frozen=True)
class LoraSettings:
    """Everything that a training's result depends on, except the output folder. Equal settings give the same bits."""

    model: str = "smollm2-135m"
    task: str = "coin-flip"
    max_people: int = 4
    steps: int = 240
    batch: int = 16
    """Questions in a step."""
    micro_batch: int = 8
    """Questions in a forward. Similar lengths are put together, to compute few pads."""
    rank: int = 8
    alpha: int = 16
    """The adapter's product is scaled by alpha / rank."""
    first_layer: int = 10
    """First block with an adapter; no gradient runs through earlier blocks."""
    learning_rate: float = 2e-3
    """Peak value, reached after `warmup_steps`; then falls by a cosine to zero at the end."""
    warmup_steps: int = 10
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    running_weight: float = 0.5
    """Weight of the auxiliary loss: heads against tails on the token that completes each person's words. 0 for none."""
    curriculum: float = 0.5
    """Share of the steps over which the number of people grows from 1 to `max_people`."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.task.replace("_", "-") not in TASKS:
            raise ValueError(f"no training for the task {self.task!r}; there is one for {', '.join(TASKS)}")
        object.__setattr__(self, "task", self.task.replace("_", "-"))
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type in (int, float):
                whole = isinstance(value, int) and not isinstance(value, bool)
                if not (whole or (field.type is float and isinstance(value, float))) or not 0 <= value < 2**31:
                    kind = "whole number" if field.type is int else "number"
                    raise ValueError(f"{field.name} must be a {kind} of at least 0, got {value!r}")
        for name in ("max_people", "steps", "batch", "micro_batch", "rank", "alpha", "learning_rate", "max_grad_norm"):
            if not getattr(self, name):
                raise ValueError(f"{name} must be more than 0")
        if self.max_people > len(HELD_OUT_NAMES):
            raise ValueError(f"max_people={self.max_people} is more than the {len(HELD_OUT_NAMES)} names held out")
        if self.curriculum > 1:
            raise ValueError(f"curriculum is a share of the steps, from 0 to 1, got {self.curriculum}")

    def people_at(self, step: int) -> int:
        """Returns the maximum number of people in a question of this step, counted from 0."""
        length = self.curriculum * self.steps
        reached = 1.0 if step >= length else step / length
        return min(self.max_people, 1 + int(reached * self.max_people))

    def learning_rate_at(self, step: int) -> float:
        """Returns the learning rate of a step, counted from 0."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / (self.warmup_steps + 1)
        share = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.learning_rate * (1 + cos(pi * share)) / 2

    def command(self) -> str:
        """Returns the command line that trains with these settings."""
        words = ["cacheprobe train lora", f"--model {self.model}", f"--task {self.task}"]
        for field in fields(self)[2:]:
            if (value := getattr(self, field.name)) != field.default:
                words.append(f"--{field.name.replace('_', '-')} {value}")
        return " ".join(words)

    def as_dict(self) -> dict[str, object]:
        """Returns the settings as a dictionary."""
        return asdict(self)
