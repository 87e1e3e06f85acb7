"""Defines and checks the settings of a LoRA training, before any model is loaded."""

from dataclasses import asdict, dataclass, field, fields
from math import cos, pi
from pathlib import Path

from cacheprobe.core.values import NO_FLAG, require_settings
from cacheprobe.tasks.people import HELD_OUT_NAMES

TASKS = ("coin-flip",)


@dataclass(frozen=True)
class LoraSettings:
    """Holds the settings of a LoRA training on coin-flip questions.

    The docstrings of the fields are the help of `cacheprobe train lora`. On one machine and with one number of threads,
    equal settings give equal bits of the adapter.
    """

    model: str = "smollm2-135m"
    """The base model: smollm2-135m, a hub name or a local directory."""
    task: str = "coin-flip"
    """coin-flip."""
    max_people: int = 4
    """Largest number of people in a training question."""
    steps: int = 240
    """Steps of the training."""
    batch: int = 16
    """Questions of a step."""
    micro_batch: int = field(default=8, metadata=NO_FLAG)
    """Questions in a forward. Similar lengths are put together, to compute few pads."""
    rank: int = 8
    """Rank of the adapter."""
    alpha: int = field(default=16, metadata=NO_FLAG)
    """The adapter's product is scaled by alpha / rank."""
    first_layer: int = 10
    """First block with an adapter."""
    learning_rate: float = 2e-3
    """Highest learning rate."""
    warmup_steps: int = field(default=10, metadata=NO_FLAG)
    """Steps until the highest learning rate, which then falls by a cosine to zero at the end."""
    weight_decay: float = field(default=0.0, metadata=NO_FLAG)
    max_grad_norm: float = field(default=1.0, metadata=NO_FLAG)
    running_weight: float = 0.5
    """Weight of the auxiliary loss on the state after each person; 0 trains on the answer only."""
    curriculum: float = 0.5
    """Share of the steps over which the number of people grows."""
    seed: int = 0
    """Seed of the questions and the first weights."""

    def __post_init__(self) -> None:
        if self.task.replace("_", "-") not in TASKS:
            raise ValueError(f"no training for the task {self.task!r}; there is one for {', '.join(TASKS)}")
        object.__setattr__(self, "task", self.task.replace("_", "-"))
        above_zero = ("max_people", "steps", "batch", "micro_batch", "rank", "alpha", "learning_rate", "max_grad_norm")
        require_settings(self, above_zero)
        if self.max_people > len(HELD_OUT_NAMES):
            raise ValueError(f"max_people={self.max_people} is more than the {len(HELD_OUT_NAMES)} names held out")
        if self.curriculum > 1:
            raise ValueError(f"curriculum is a share of the steps, from 0 to 1, got {self.curriculum}")

    def people_at(self, step: int) -> int:
        """Returns the largest number of people in a question of step number `step`, from 0: grows from 1 to
        `max_people` during the first `curriculum` x `steps` steps."""
        length = self.curriculum * self.steps
        reached = 1.0 if step >= length else step / length
        return min(self.max_people, 1 + int(reached * self.max_people))

    def learning_rate_at(self, step: int) -> float:
        """Returns the learning rate of step number `step`, from 0: a linear warm-up, then a cosine to zero."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / (self.warmup_steps + 1)
        share = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.learning_rate * (1 + cos(pi * share)) / 2

    def command(self) -> str:
        """Returns the shell command, as text, that trains with these settings: cacheprobe train lora --model ... The
        command works if the settings without a flag, such as `alpha`, have their default values."""
        words = ["cacheprobe train lora", f"--model {self.model}", f"--task {self.task}"]
        for one in fields(self)[2:]:
            if (value := getattr(self, one.name)) != one.default:
                words.append(f"--{one.name.replace('_', '-')} {value}")
        return " ".join(words)

    def as_dict(self) -> dict[str, object]:
        """Returns the settings as a dictionary, by field name."""
        return asdict(self)


@dataclass(frozen=True)
class EvaluationSettings:
    """Holds the settings of `cacheprobe train lora --evaluate`, which evaluates an adapter."""

    evaluate: str | None = None
    """Evaluate the model with and without this adapter, a directory or coin-flip; do not train."""
    people: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 8, 10)
    """Numbers of people in an evaluation; 1 to 6, 8 and 10 by default."""
    flip_probability: tuple[float, ...] = (0.5,)
    """Chances to flip in an evaluation; 0.5 by default."""
    questions: int = 200
    """Number of questions in an evaluation for each number of people and chance to flip."""
    json: Path | None = None
    """Also write the evaluation to this file."""
