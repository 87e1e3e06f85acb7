"""Do the losses fall when a pretrained model is given T and C, and what of the fall do its states do?

    python -m cacheprobe_analyses.pretrained_learns --json analyses/results/pretrained-learns.json

SmolLM2-135M with T and C around it, on the coin flip with gold thoughts; no text comes twice, so the loss of a step is
that of fresh texts. By default T and C alone learn. Afterwards, on texts of their own: the backbone without states, the
model under gold thoughts, and under those of the opposite coin. Losses alone, under gold thoughts: whether it flips
coins by its own thoughts is not asked, and a few dozen steps are no training to judge it by.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from cacheprobe.core.files import write_json
from cacheprobe.models.loaders import plain_model
from cacheprobe.models.thinking.model import ThinkingModel
from cacheprobe.models.thinking.pretrained import ThinkingPretrained, config_of
from cacheprobe.tasks import Annotated, CoinFlip, annotate_all, mixed
from cacheprobe.tasks.base import Example
from cacheprobe.training.loop import LoopSettings, ModelLoop, TrainingProgress, one_thread
from cacheprobe.training.thinking.losses import collate, losses
from cacheprobe_analyses.records import DIGITS

LOSSES = ("lm", "thoughts")


@dataclass(frozen=True)
class Config:
    """What is trained on what, and for how long."""

    model: str = "smollm2-135m"
    """A name or a directory of a model that T and C can be added to."""
    trains_backbone: bool = False
    chunk: int = 8
    form: str = "restate"
    operations: tuple[int, ...] = (1, 2)
    steps: int = 60
    batch: int = 4
    lr: float = 1e-3
    warmup: int = 6
    every: int = 6
    """Steps to a line."""
    texts: int = 16
    """Of the end's comparison, none of them trained on."""
    seed: int = 0


@dataclass(frozen=True)
class Line:
    """Means over some steps, in nats for each text: what `training.thinking_states.losses` gives."""

    first: int
    last: int
    """Steps, counted from 1."""
    lm: float
    thoughts: float


@dataclass(frozen=True)
class Result:
    """How the losses fell, and what the answer's loss is without states and under wrong ones."""

    model: str
    weights: str
    """What is to be known of them."""
    parameters: int
    added: int
    """T's and C's."""
    trained: int
    lines: list[Line]
    texts: int
    backbone: float
    """lm of the texts of the end: without states, after the training."""
    gold: float
    """lm under gold thoughts."""
    opposite: float
    """lm under those of the opposite coin."""
    cpu_seconds: float
    """Of the training steps, one thread."""

    @classmethod
    def of(cls, held: dict[str, Any]) -> "Result":
        """A stored result."""
        return cls(**{**held, "lines": [Line(**line) for line in held["lines"]]})

    def table(self) -> str:
        """In Markdown."""
        rows = [f"| {line.first} to {line.last} | {line.lm:.2f} | {line.thoughts:.2f} |" for line in self.lines]
        return "\n".join(
            [
                "| steps | lm, nats a text | thoughts, nats a text |",
                "|---|---|---|",
                *rows,
                "",
                f"lm of {self.texts} texts never trained on: {self.backbone:.2f} without states, {self.gold:.2f} under "
                f"gold thoughts, {self.opposite:.2f} under those of the opposite coin (heads or tails by chance: 0.69)",
                "",
                f"{self.model}{f' ({self.weights})' if self.weights else ''}: {self.parameters:,} parameters, "
                f"{self.added:,} of them added, {self.trained:,} trained; {self.cpu_seconds:.0f} s of one core",
            ]
        )


@one_thread()
def run(config: Config, progress: bool = False) -> Result:
    """Train, and compare. Raises: ModelError for a model that T and C cannot be added to."""
    backbone, tokenizer, note = plain_model(config.model, "float32", progress=progress)
    if tokenizer.pad_token_id in (None, tokenizer.eos_token_id):  # a pad that no thought holds
        tokenizer.pad_token = tokenizer.unk_token
    ends = dict(eos_id=tokenizer.eos_token_id, pad_id=tokenizer.pad_token_id)
    shapes = config_of(backbone, **ends, chunk=config.chunk)
    model = ThinkingPretrained(backbone, shapes, config.seed)
    model.train_backbone(config.trains_backbone)
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)

    drawn = annotate_all(different_texts(config), tokenizer, config.chunk, config.form)
    items, fresh = drawn[: -config.texts], drawn[-config.texts :]

    settings = LoopSettings(config.steps, config.batch, config.lr, warmup=config.warmup, seed=config.seed)
    loop, steps = ModelLoop(model, settings), []
    with TrainingProgress(config.steps, 0, progress) as show:
        for at in loop.minimise(
            lambda step: losses(model, collate(items[step * config.batch :][: config.batch], "thinking", shapes.pad_id))
        ):
            steps.append(at.losses)
            show(at.step, ", ".join(f"{name} {value:.3f}" for name, value in at.losses.items()))
    plain = ThinkingPretrained(backbone, replace(shapes, thinks=False))
    return Result(
        config.model,
        note,
        model.num_parameters,
        sum(weight.numel() for weight in model.added_parameters()),
        trained,
        list(_lines(steps, config.every)),
        len(fresh),
        _lm(plain, fresh, "plain"),
        _lm(model, fresh, "thinking"),
        _lm(model, opposite(fresh), "thinking"),
        round(loop.cpu_seconds, 1),
    )


def different_texts(config: Config) -> list[Example]:
    """Those of the training, in their order, and those of the end: none twice."""
    wanted = config.steps * config.batch + config.texts
    task = CoinFlip(people=max(config.operations), distinct=True)
    drawn = mixed(task, config.operations, n=4 * wanted, seed=config.seed)
    different = list({example.question.text: example for example in drawn}.values())
    if len(different) < wanted:
        raise ValueError(
            f"{wanted} different texts are needed and {len(different)} were found; take fewer steps or more operations"
        )
    return different[:wanted]


def opposite(items: Sequence[Annotated]) -> list[Annotated]:
    """The same texts and answers, with heads for tails in every thought."""
    said = sorted({thought for item in items for thought in item.thoughts if len(thought) > 1})
    if len(said) != 2:
        raise ValueError(f"these texts have {len(said)} different thoughts, not two coins' sides; give more texts")
    other = dict(zip(said, reversed(said), strict=True))
    return [replace(item, thoughts=tuple(other.get(t, t) for t in item.thoughts)) for item in items]


@torch.inference_mode()
def _lm(model: ThinkingModel, items: Sequence[Annotated], arm: str) -> float:
    return round(float(losses(model, collate(items, arm, model.config.pad_id))["lm"]), DIGITS)


def _lines(steps: Sequence[dict[str, float]], every: int) -> Iterator[Line]:
    for first in range(0, len(steps), every):
        part = steps[first : first + every]
        means = {name: round(fmean(step[name] for step in part), DIGITS) for name in LOSSES}
        yield Line(first + 1, first + len(part), **means)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default=Config.model, help="a name or a directory")
    parser.add_argument("--steps", type=int, default=Config.steps)
    parser.add_argument("--train-backbone", action="store_true", help="too, and not T and C alone")
    parser.add_argument("--seed", type=int, default=Config.seed)
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    given = parser.parse_args()
    config = Config(given.model, given.train_backbone, steps=given.steps, seed=given.seed)
    result = run(config, progress=True)
    print(result.table())
    if given.json:
        write_json(given.json, asdict(result))


if __name__ == "__main__":
    main()
