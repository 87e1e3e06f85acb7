"""How far does a minute of one core bring the coin-flip models, on texts as long as those they are trained on?

    python -m cacheprobe_analyses.minute_of_training --json analyses/results/minute-of-training.json

Each preset's own training, its schedule unchanged, is broken off after so many seconds of processor time: steps alone,
as `cacheprobe train thinking-states` counts them. What stands then is tested by its own thoughts and words.
"""

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cacheprobe.tasks.base import Accuracy
from cacheprobe.training.loop import TrainingProgress, one_thread
from cacheprobe.training.thinking.presets import preset_of
from cacheprobe.training.thinking.run import CHECK_TEXTS, TEST_SEED, train
from cacheprobe_analyses.command import command


@dataclass(frozen=True)
class Config:
    """What is trained, and for how long."""

    presets: tuple[str, ...] = ("tiny", "small")
    """Of coin-flip."""
    seconds: float = 60.0
    """Of processor time, for each."""
    texts: int = 1000
    """Of the test: every trained number of operations and flip probability alike."""
    seed: int = 0


@dataclass(frozen=True)
class Line:
    """What a preset came to."""

    preset: str
    parameters: int
    steps: int
    """That fitted into the time."""
    steps_of_preset: int
    cpu_seconds: float
    to_99: float | None
    """Seconds until 99 % of the fresh texts of a check were wholly right, twice running."""
    to_100: float | None
    texts: int
    right: int
    thoughts_right: int


@dataclass(frozen=True)
class Result:
    """A line for each preset, and what it was timed on."""

    lines: list[Line]
    machine: str

    @classmethod
    def of(cls, held: dict[str, Any]) -> "Result":
        """A stored result."""
        return cls([Line(**line) for line in held["lines"]], held["machine"])

    def table(self) -> str:
        """In Markdown."""
        head = [
            "preset",
            "parameters",
            "steps",
            "seconds",
            "to 99 %",
            "to 100 %",
            "right",
            "95 %",
            "all thoughts right",
        ]
        lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        for line in self.lines:
            low, high = Accuracy(line.texts, line.right, 0, 0.5).interval
            told = [
                line.preset,
                f"{line.parameters:,}",
                f"{line.steps} of {line.steps_of_preset}",
                f"{line.cpu_seconds:.1f}",
                *(f"{reached:.1f}" if reached else "not reached" for reached in (line.to_99, line.to_100)),
                f"{line.right} of {line.texts}",
                f"{100 * low:.1f} to {100 * high:.1f}",
                str(line.thoughts_right),
            ]
            lines.append(f"| {' | '.join(told)} |")
        return "\n".join(lines)


@one_thread()
def run(config: Config, progress: bool = False) -> Result:
    """Train each preset for the time given, and test it."""
    lines = []
    for name in config.presets:
        preset = preset_of("coin-flip", name)
        total, steps = preset.loop_settings("thinking", config.seed).steps, 0
        with TrainingProgress(total, 0, progress) as show:

            def report(at: Any, accuracy: float | None, name=name, show=show) -> None:
                nonlocal steps
                steps = at.step
                show(at.step, f"{name}, {at.cpu_seconds:.0f} of {config.seconds:.0f} s")

            trained = train(preset, "thinking", config.seed, report=report, seconds=config.seconds)
        # one test of all flip probabilities, each of which has its share
        share = -(-config.texts // len(preset.variants))
        verdicts = [
            trained.test(preset.operations, share, TEST_SEED + 10 + i, **variant)
            for i, variant in enumerate(preset.variants)
        ]
        lines.append(
            Line(
                name,
                trained.model.num_parameters,
                steps,
                total,
                round(trained.cpu_seconds, 1),
                *(reached and round(reached, 1) for reached in (trained.cpu_seconds_to_99, trained.cpu_seconds_to_100)),
                sum(len(v.is_right) for v in verdicts),
                sum(sum(v.is_right) for v in verdicts),
                sum(sum(v.is_thought_right) for v in verdicts),
            )
        )
    return Result(lines, f"{_processor()}, torch {torch.__version__}")


def _processor() -> str:
    """Its name, without which seconds mean little."""
    path = Path("/proc/cpuinfo")
    said = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = [line.split(":", 1)[1].strip() for line in said if line.startswith("model name")]
    return names[0] if names else platform.machine()


def main() -> None:
    def shown(result: Result) -> str:
        return f"{result.table()}\n\nto 99 and 100 %: of {CHECK_TEXTS} fresh texts, twice running; {result.machine}"

    command(__doc__, Config, run, shown, seconds="of processor time, for each preset", texts="of the test", seed="")


if __name__ == "__main__":
    main()
