"""By which algorithm does a model follow permutations of three things: by composing, or by the parity first?

    python -m cacheprobe_analyses.s3_algorithm --json analyses/results/s3-algorithm.json

Models are trained on the word problem on S3, what is not in `folder` yet (one core), and asked for three signatures:
probes of the state and of its parity by layer, prefix patching with texts that differ in their first action, and what
is right beyond the trained length. Refused for a model that does not beat chance.
In an associative algorithm a layer doubles the stretch that is composed, and parity and state become readable together;
in a parity-associative one the parity is readable before the state. Two classes are read sooner than six in any case,
so the parity counts as read first only where no other half of the states is read as well.
Source: Li, Guo and Andreas 2025 (arXiv 2503.02854).
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

import cacheprobe as cp
from cacheprobe.core.files import write_json
from cacheprobe.tasks.base import Accuracy
from cacheprobe.training.loop import LoopSettings, one_thread
from cacheprobe.views import state_algorithm_figure
from cacheprobe_analyses.records import records_of
from cacheprobe_analyses.s3.s3_models import Subject, group_task, trained
from cacheprobe_analyses.s3.s3_signatures import length_lines, patch_lines, probe_lines, thought_patch_lines

SURE = 0.95
"""Accuracy from which on a probe is said to read the state, or the parity."""
CAPACITY = 64


def plain(layers: int, operations: int, seed: int = 0, steps: int = 6000) -> Subject:
    """A plain model of so many layers, trained on texts of so many operations."""
    model = dict(n_layers=layers, l_out=layers - 1)
    loop = LoopSettings(steps=steps, batch=32, lr=3e-3, warmup=200, seed=seed)
    return Subject(f"plain, {layers} layers, {operations} operations, seed {seed}", operations, seed, model, loop)


def thinking(operations: int, seed: int = 0, steps: int = 1200) -> Subject:
    """A Thinking States model, of chunks of two actions; its attention reaches its chunk and the one before."""
    model = dict(chunk=2, attention_window=4)
    loop = LoopSettings(steps=steps, batch=32, weight_decay=0.1, seed=seed)
    return Subject(f"thinking, {operations} operations, seed {seed}", operations, seed, model, loop, thinks=True)


SUBJECTS = (plain(4, 8), plain(4, 4, steps=3000), plain(4, 4, seed=1, steps=3000), thinking(8))


@dataclass(frozen=True)
class Config:
    """What is asked of which models."""

    subjects: tuple[Subject, ...] = SUBJECTS
    folder: Path = Path("runs/s3-algorithm")
    prompts: int = 240
    """For the probes."""
    least: int = 10
    """Groups of prompts of each class at each place."""
    pairs: int = 32
    """For prefix patching, of each kind; those that are not both answered rightly are left out."""
    texts: int = 400
    """For each length."""
    seed: int = 4_000_000


@dataclass(frozen=True)
class Result:
    """By model: how it was made, what it answers, and its three signatures; the lines are those of `s3_signatures`."""

    models: dict[str, dict[str, Any]]
    probes: list[dict[str, Any]]
    patches: list[dict[str, Any]]
    lengths: list[dict[str, Any]]

    def joined(self, newer: "Result") -> "Result":
        """These models and those; of one that is in both, what is newer."""
        lines = [
            [line for line in ours if line["model"] not in newer.models] + theirs
            for ours, theirs in zip((self.probes, self.patches, self.lengths),
                                    (newer.probes, newer.patches, newer.lengths), strict=True)
        ]  # fmt: skip
        return Result({**self.models, **newer.models}, *lines)

    def figure(self, model: str) -> Any:
        """The probes and the prefixes of one model. Raises: ValueError for one that is not there."""
        if model not in self.models:
            raise ValueError(f"there is no model {model!r}; there are {'; '.join(self.models)}")
        probes, patches = (table[table.model == model] for table in map(pd.DataFrame, (self.probes, self.patches)))
        return state_algorithm_figure(probes, patches)

    def read_from(self, model: str, label: str) -> dict[int, int | None]:
        """By number of operations: since which layer the probe is SURE in every one; None where it never is."""
        table = pd.DataFrame(self.probes)
        here = table[(table.model == model) & (table.label == label)]
        return {int(place): _since(lines) for place, lines in here.groupby("place")}

    def reach(self, model: str, kind: str) -> list[int]:
        """By layer: the shortest prefix, as its last position, from which on the mean NLD is at least a half."""
        table = pd.DataFrame(self.patches)
        here = table[(table.model == model) & (table.kind == kind)] if len(table) else table
        return [_reach(lines) for _, lines in here.groupby("layer")] if len(here) else []

    def order(self, model: str) -> str:
        """Whether the parity is read before the state, at the largest number of operations that was probed."""
        state, parity = (list(self.read_from(model, label).values())[-1] for label in ("state", "parity"))
        if parity is None:
            return "neither is read" if state is None else "together"
        if state is not None and parity >= state:
            return "together"
        return "any half first" if self.other_halves(model, parity)[1] >= SURE else "parity first"

    def other_halves(self, model: str, layer: int) -> tuple[float, float]:
        """Mean and best accuracy of the probes of the nine other halves, at the largest number of operations."""
        table = pd.DataFrame(self.probes)
        here = table[(table.model == model) & (table.label == "halves") & (table.layer == layer)]
        last = here.loc[here.place.idxmax()]
        return float(last.accuracy), float(last.high)

    def table(self) -> str:
        """Every signature of every model."""
        return "\n\n".join([self._summary(), *(f"`{name}`\n\n{self._signatures(name)}" for name in self.models)])

    def _summary(self) -> str:
        lines = [
            "| model | steps | seconds | answers right | parity read from layer | other halves there, mean (best) | "
            "state | order | reach by layer, same parity | other parity |",
            "|---" * 10 + "|",
        ]
        for name, made in self.models.items():
            state, parity = (list(self.read_from(name, label).values())[-1] for label in ("state", "parity"))
            same, other = (", ".join(map(str, self.reach(name, kind))) for kind in ("same", "other"))
            halves = "" if parity is None else "{:.3f} ({:.3f})".format(*self.other_halves(name, parity))
            lines.append(
                f"| {name} | {made['steps']} | {made['cpu_seconds']} | {made['accuracy']:.3f} of "
                f"{made['num_examples']} | {_or_none(parity)} | {halves} | {_or_none(state)} | {self.order(name)} | "
                f"{same} | {other} |"
            )
        return "\n".join(lines)

    def _signatures(self, name: str) -> str:
        table = pd.DataFrame(self.probes)
        here = table[table.model == name].set_index(["place", "label", "layer"])
        places, layers = (sorted(here.index.unique(level)) for level in ("place", "layer"))
        head = [f"{label}, {place}" for label in ("parity", "other halves", "state") for place in places]
        lines = [f"| layer | {' | '.join(head)} |", "|---" * (len(head) + 1) + "|"]
        for layer in layers:
            cells = [here.loc[(p, label, layer)] for label in ("parity", "halves", "state") for p in places]
            told = [f"{c.accuracy:.3f} ({c.high if c.untrained != c.untrained else c.untrained:.3f})" for c in cells]
            lines.append(f"| {layer} | {' | '.join(told)} |")
        for label in ("parity", "state"):
            one = [here.loc[(p, label, layers[0])] for p in places]
            of = here[here.index.get_level_values("label") == label]
            lines += [""] if label == "parity" else []
            lines.append(
                f"- {label}: commonest {_list(c.majority for c in one)}; words alone "
                f"{_list(c.embedding for c in one)}; labels in random order {of.shuffled.min():.3f} to "
                f"{of.shuffled.max():.3f}; control tasks {of.control.min():.3f} to {of.control.max():.3f}"
            )
        made = self.models[name]
        lines += ["", "| operations | texts | state right | parity right | parity right where the state is wrong |",
                  "|---|---|---|---|---|"]  # fmt: skip
        for line in self.lengths:
            if line["model"] == name:
                lines.append(
                    f"| {line['operations']} | {line['texts']} | {_share(line['right'], line['texts'])} | "
                    f"{_share(line['parity_right'], line['texts'])} | {line['parity_right_of_wrong']} of "
                    f"{line['wrong']} |"
                )
        pairs = {line["kind"]: line["pairs"] for line in self.patches if line["model"] == name}
        lines += [
            "",
            f"Prefixes of {pairs.get('same', 0)} pairs of the same parity and {pairs.get('other', 0)} of the other. "
            f"Own states put in again change a pair's logit difference by {made['own_again']:.1e} of it at most.",
        ]
        return "\n".join(lines)


@one_thread()
def run(config: Config, report: Callable[[str], None] = lambda line: None, progress: bool = False) -> Result:
    """Train what is not trained yet, and ask every model for its signatures."""
    models: dict[str, dict[str, Any]] = {}
    probes, patches, lengths = [], [], []
    for subject in config.subjects:
        lm = trained(subject, config.folder, report, progress=progress)
        found = measure(lm, subject.operations, config)
        models[subject.name] = {**{k: lm.record[k] for k in ("steps", "seed", "parameters", "cpu_seconds")}, **found[0]}
        for held, lines in zip((probes, patches, lengths), found[1:], strict=True):
            held += [{"model": subject.name, **line} for line in lines]
        report(f"{subject.name}: {found[0]['accuracy']:.3f} of {found[0]['num_examples']} answers right")
    return Result(models, *(records_of(pd.DataFrame(lines)) for lines in (probes, patches, lengths)))


def measure(lm: Any, operations: int, config: Config) -> tuple[dict[str, Any], list, list, list]:
    """One model's behaviour, probes, prefixes and lengths. Raises: ProbeError for a model that does not beat chance."""
    examples = group_task(operations).examples(config.prompts, config.seed)
    settings = dict(capture="S", capacity=CAPACITY, progress=False)
    trace = cp.run(lm, examples, max_new_tokens=2, **settings)
    done = cp.probes.require_above_chance(trace)
    bare = cp.run(cp.probes.untrained(lm), examples, max_new_tokens=1, **settings)
    probes = probe_lines(trace, bare, _places(operations), config.least, config.seed)
    others = group_task(operations).examples(config.pairs, config.seed + 1)
    patches, own = thought_patch_lines(lm, others, CAPACITY) if lm.config.thinks else patch_lines(lm, others)
    longer = group_task(3 * operations).examples(config.texts, config.seed + 2)
    lengths = length_lines(lm, longer, sorted({operations * n // 4 for n in (2, 4, 5, 6, 8, 12)}))
    about = {name: done[name] for name in ("accuracy", "accuracy_low", "accuracy_high", "chance", "num_examples")}
    return {**about, "own_again": own}, probes, patches, lengths


def _places(operations: int) -> list[int]:
    """Numbers of operations, each half of the next, the last being all."""
    places = [operations]
    while places[0] > 3:
        places.insert(0, places[0] // 2)
    return places


def _reach(lines: pd.DataFrame) -> int:
    short = lines.position[lines.nld < 0.5]
    return int((lines.position if short.empty else lines.position[lines.position > short.max()]).min())


def _since(lines: pd.DataFrame) -> int | None:
    unsure = lines.layer[lines.accuracy < SURE]
    first = int(lines.layer.min() if unsure.empty else unsure.max() + 1)
    return first if first <= lines.layer.max() else None


def _or_none(layer: int | None) -> str:
    return "none" if layer is None else str(layer)


def _list(numbers: Any) -> str:
    return ", ".join(f"{x:.3f}" for x in numbers)


def _share(right: int, texts: int) -> str:
    low, high = Accuracy(texts, right, 0, 0.5).interval
    return f"{right / texts:.3f} ({low:.3f} to {high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--folder", type=Path, default=Config.folder, help="where trained models are, or go")
    parser.add_argument("--only", default="", help="models whose name holds this text")
    parser.add_argument("--json", type=Path, help="also write what was found to this file, model by model")
    given = parser.parse_args()
    chosen = tuple(subject for subject in SUBJECTS if given.only in subject.name)
    if not chosen:
        parser.error(f"no model's name holds {given.only!r}; there are {'; '.join(s.name for s in SUBJECTS)}")
    known = given.json is not None and given.json.exists()
    result = Result(**json.loads(given.json.read_text(encoding="utf-8"))) if known else Result({}, [], [], [])
    for subject in chosen:
        found = run(Config((subject,), given.folder), lambda line: print(line, flush=True), progress=True)
        result = result.joined(found)
        if given.json:
            write_json(given.json, asdict(result))
    print(result.table())


if __name__ == "__main__":
    main()
