"""Defines and checks the settings of trainings, before any model or run is loaded. Imports no torch, so that the
command line's help is quick."""

from dataclasses import asdict, dataclass, field, fields
from math import cos, pi
from pathlib import Path
from typing import TYPE_CHECKING, cast

from cacheprobe.core.hook_names import SITES
from cacheprobe.core.values import NO_FLAG, JsonDict, require_one_of, require_settings, whole_number
from cacheprobe.tasks.drawing import HELD_OUT_NAMES

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

TASKS = ("coin-flip",)


class TrainingSettings:
    """Gives the settings of a training a learning rate that falls linearly to zero, and a form as JSON."""

    steps: int
    """Number of steps of the whole training."""
    learning_rate: float
    max_grad_norm: float
    """Largest norm of the gradient of a step; a larger gradient is scaled down to it."""

    def learning_rate_at(self, step: int) -> float:
        """Returns the learning rate of step number `step`, from 0."""
        return self.learning_rate * (1 - step / self.steps)

    def as_dict(self) -> JsonDict:
        """Returns the settings as a dictionary, by field name."""
        return asdict(cast("DataclassInstance", self))


@dataclass(frozen=True)
class LoraSettings(TrainingSettings):
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
        object.__setattr__(self, "task", self.task.replace("_", "-"))
        require_one_of("task of a training", self.task, TASKS)
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


@dataclass(frozen=True)
class TunedLensSettings(TrainingSettings):
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
        whole_number("length, a prompt's token and one more,", self.length, at_least=2)
        if not self.momentum < 1:
            raise ValueError(f"momentum must be below 1, got {self.momentum}")

    def learning_rate_at(self, step: int) -> float:
        """Returns the learning rate for PyTorch's optimizer at step number `step`, from 0: `learning_rate` times (1 -
        momentum), falling linearly to zero."""
        return self.learning_rate * (1 - self.momentum) * (1 - step / self.steps)


@dataclass(frozen=True)
class DictionarySettings(TrainingSettings):
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
        require_one_of("site to train on", self.site, SITES)
        if self.k > self.features:
            raise ValueError(f"k must be at most the number of features, {self.features}, got {self.k}")
        if not self.held_out < 1:
            raise ValueError(f"held_out is a share and must be below 1, got {self.held_out}")


@dataclass(frozen=True)
class HeadSettings(TrainingSettings):
    """Holds the settings of a draft head's training on target states, and of the run that gives these. The docstrings
    of the fields are the help of `cacheprobe train eagle3` and `train mtp`."""

    texts: int = 512
    """Texts that the model writes, if no run is given: continuations of the tasks' prompts, every second one sampled at
    temperature 1, the others greedy."""
    new_tokens: int = 96
    """Tokens of a continuation, at most."""
    steps: int = 320
    """Steps of the training."""
    batch: int = 8
    """Texts in a step, drawn anew."""
    chain: int = 3
    """Tokens of a chain: the head learns to draft so many, the later ones from its own states."""
    learning_rate: float = 1e-3
    """Highest learning rate."""
    warmup_steps: int = field(default=20, metadata=NO_FLAG)
    """Steps until the highest learning rate, which then falls linearly to zero."""
    max_grad_norm: float = field(default=0.5, metadata=NO_FLAG)
    held_out: float = 0.1
    """Share of the prompts that are never trained on."""
    seed: int = 0
    """Seed of the weights and of the order of the texts. Held-out prompts are the same for all seeds."""

    def __post_init__(self) -> None:
        above_zero = ("texts", "new_tokens", "steps", "batch", "chain", "learning_rate", "max_grad_norm", "held_out")
        require_settings(self, above_zero)
        if not self.held_out < 1:
            raise ValueError(f"held_out is a share and must be below 1, got {self.held_out}")

    def learning_rate_at(self, step: int) -> float:
        """Returns the learning rate of step number `step`, from 0: a linear warm-up, then a line to zero."""
        return self.learning_rate * min((step + 1) / (self.warmup_steps + 1), 1 - step / self.steps)


@dataclass(frozen=True)
class Eagle3Settings(HeadSettings):
    """Holds the settings of an EAGLE-3 head's training."""

    draft_vocab: int = 8192
    """Tokens that the head can draft: the most frequent ones of the texts."""
    layer_ids: tuple[int, ...] | None = None
    """Blocks whose inputs the head reads, counted from 0; by default 2, n/2 and n - 3 of n, as EAGLE-3 does."""
    norm_output: bool = False
    """Feed back the state after the head's last norm, as EAGLE-3.1 does, not the one before it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number("draft_vocab", self.draft_vocab, at_least=1)


@dataclass(frozen=True)
class MtpSettings(HeadSettings):
    """Holds the settings of an MTP module's training."""

    steps: int = 200
    """Steps of the training."""
    chain: int = 1
    """Tokens of a chain: 1, as published modules are trained. With more, the later ones follow from its own states."""
