"""Does a recurrent state hold the coin, and what do negative eigenvalues change?

    python -m cacheprobe_analyses.recurrent_coin --json analyses/results/recurrent-coin.json

Tiny models read a text of flips, and say after each token how the coin lies. They are trained on texts of up to 40
tokens and tested on 40 to 256. DeltaNet and Mamba are trained with eigenvalues of the state transition in [0, 1] and in
[-1, 1]; a transformer is the control. A probe reads the coin from the recurrent state; then the states of two texts are
exchanged.
Source: Grazzi et al. 2024 (arXiv 2411.12537), table 3, column "parity", whose models are larger.
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cacheprobe.training.loop import LoopSettings, TrainingProgress, one_thread
from cacheprobe_analyses.command import command
from cacheprobe_analyses.recurrent.parity_models import Subject, right, trained, untrained
from cacheprobe_analyses.recurrent.state_of_coin import exchanged, probed

PUBLISHED = {
    "transformer": 0.022,
    "deltanet [0, 1]": 0.017,
    "deltanet [-1, 1]": 1.0,
    "mamba [0, 1]": 0.0,
    "mamba [-1, 1]": 1.0,
}
"""Accuracy of the best of three seeds, in the paper's table 3: 0 is chance, 1 is always right."""
LOOPS: Mapping[str, LoopSettings] = {
    "transformer": LoopSettings(300, 64, 3e-3, weight_decay=0.0),
    "deltanet": LoopSettings(1600, 32, 1e-2, weight_decay=0.0),
    "mamba": LoopSettings(500, 64, 1e-2, weight_decay=0.0),
}
SMALL_STEPS = 500
"""Most steps of a training with preset small."""
LONGEST_TEST = 256


@dataclass(frozen=True)
class Config:
    """How many models are trained, and on how many texts each is tested."""

    seeds: int = 3
    texts: int = 64
    """Texts of 256 tokens that test a model after 40 to 256 tokens."""
    each: int = 3
    """Texts of each length that a probe reads."""
    pairs: int = 24
    """Pairs of texts whose states are exchanged."""
    only: str = ""
    """One architecture; all by default."""
    preset: str = "full"
    """"small" for one seed: under three minutes of one core."""

    def __post_init__(self) -> None:
        if self.preset not in ("full", "small"):
            raise ValueError(f"unknown preset {self.preset!r}; choose full or small")


@dataclass(frozen=True)
class Result:
    """models: a line for each architecture, range of eigenvalues and seed; accuracy is normalised as in the paper.

    probe and exchange, see `state_of_coin`, are null for a transformer, and for all seeds but 0."""

    models: list[dict[str, Any]]

    def table(self) -> str:
        """Accuracy by model beside the published one, then what probe and exchange found with seed 0."""
        lines = [
            "| model | up to 40 tokens | 40 to 256 tokens, best seed | each seed | published |",
            "|---|---|---|---|---|",
        ]
        best = {name: max(self._of(name), key=lambda one: one["longer"]) for name in PUBLISHED if self._of(name)}
        for name, one in best.items():
            seeds = ", ".join(f"{seed['longer']:.3f}" for seed in self._of(name))
            lines.append(f"| {name} | {one['trained']:.3f} | {one['longer']:.3f} | {seeds} | {PUBLISHED[name]:.3f} |")
        lines += [
            "",
            "| model | probe: the coin now | the coin k tokens ago | 95 % | untrained | last 4 tokens | shuffled |",
            "|---|---|---|---|---|---|---|",
        ]
        for name, one in self._read():
            now, p = one["probe"][0], max(one["probe"], key=lambda line: line["accuracy"])
            lines.append(
                f"| {name} | {now['accuracy']:.3f} | {p['accuracy']:.3f} (k = {p['ago']:.0f}) | {p['low']:.3f} to "
                f"{p['high']:.3f} | {p['untrained']:.3f} | {p['last_tokens']:.3f} | {p['shuffled']:.3f} |"
            )
        lines += [
            "",
            "| model | right | answers that change: states of another coin | of the same |",
            "|---|---|---|---|",
        ]
        for name, one in self._read():
            e = one["exchange"]
            lines.append(f"| {name} | {e['right']:.3f} | {e['moved']:.3f} | {e['moved_alike']:.3f} |")
        seconds = statistics.median(one["cpu_seconds"] for one in self.models)
        return "\n".join([*lines, "", f"a training took {seconds:.0f} s of one core (median)"])

    def _read(self) -> list[tuple[str, dict[str, Any]]]:
        """Returns (name, line) of the models whose states were read."""
        return [(one["model"], one) for one in self.models if one["probe"] is not None]

    def _of(self, name: str) -> list[dict[str, Any]]:
        return [one for one in self.models if one["model"] == name]


def subjects(config: Config) -> list[Subject]:
    """Returns the models to train."""
    is_small = config.preset == "small"
    loops = LOOPS
    if is_small:
        loops = {kind: replace(loop, steps=min(loop.steps, SMALL_STEPS)) for kind, loop in LOOPS.items()}
    kinds = [("transformer", False), *((a, signed) for a in ("deltanet", "mamba") for signed in (False, True))]
    return [
        Subject(kind, signed, seed, layers=2 if kind == "transformer" else 1, loop=loops[kind])
        for seed in range(1 if is_small else config.seeds)
        for kind, signed in kinds
        if config.only in ("", kind)
    ]


@one_thread()
def run(config: Config, progress: bool = False) -> Result:
    """Trains and tests each model; probes and exchanges the states of those that have one."""
    lines = []
    for subject in subjects(config):
        with TrainingProgress(subject.loop.steps, 0, progress) as show:
            live, seconds = trained(subject, lambda at, show=show, name=subject.name: show(at.step, name))
        lines.append(measured(subject, live, config) | {"cpu_seconds": round(seconds, 1)})
    return Result(lines)


def measured(subject: Subject, live: Any, config: Config) -> dict[str, Any]:
    """Returns the line of one trained model."""
    is_right = right(live, config.texts, LONGEST_TEST, subject.seed).double()
    known, longer = is_right[:, subject.shortest - 1 : subject.longest], is_right[:, subject.longest - 1 :]
    line = {
        "model": subject.name,
        "seed": subject.seed,
        "steps": subject.loop.steps,
        "trained": 2 * float(known.mean()) - 1,
        "longer": 2 * float(longer.mean()) - 1,
        "last": 2 * float(is_right[:, -1].mean()) - 1,
        "probe": None,
        "exchange": None,
    }
    if subject.architecture != "transformer" and subject.seed == 0:
        line["probe"] = probed(live, untrained(subject), config.each, list(range(9, 73, 2)), subject.seed)
        line["exchange"] = exchanged(live, config.pairs, before=20, behind=12, seed=subject.seed)
    return line


def main() -> None:
    command(__doc__, Config, run, only="transformer, deltanet or mamba", preset="full or small")


if __name__ == "__main__":
    main()
