"""Which states of the coin does the answer use, by layer and place: the patch beside the probe?

    python -m cacheprobe_analyses.coin_state_patch --json analyses/results/coin-state-patch.json

Pairs of coin questions differ in the word heads or tails alone, so that every state on the way differs and so do the
answers. In one of them, S of one layer and one place takes the other question's value, and the rest is computed from
it: at the places where `coin_state_probe` reads the state, and at the word itself. Of a model that thinks, also S of
the whole chunk, which a thought is read from. Controls: the own state again; the state of a question with other names
and the same coin; the own state plus noise as long as the change. Refused for a model that does not beat chance on the
questions.
Source: activation patching as in Meng et al. 2022 (arXiv 2202.05262), section 2.1.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import pandas as pd
import torch
from torch import Tensor

import cacheprobe as cp
from cacheprobe.core.terminal import Progress
from cacheprobe.edits.patching.cells import Edit, cell, read, run_cells, run_once
from cacheprobe.edits.patching.grid import difference
from cacheprobe.edits.patching.pairs import run_pair
from cacheprobe.kvcache.cache import KVCache
from cacheprobe.models.base import CachedLM
from cacheprobe.tasks.base import Accuracy, Example
from cacheprobe.tasks.coin_flip import ANSWERS, STATES, coin_question
from cacheprobe.tasks.drawing import NAMES
from cacheprobe.views import carried_figure
from cacheprobe_analyses.command import command_of_subjects
from cacheprobe_analyses.records import records_of

SWAPPED, CONTROLS = "other coin", ("own again", "other names", "noise")
WORD, END = "heads or tails", "last token"
SETTINGS = dict(capture="S", capacity=128, max_new_tokens=1, progress=False)


@dataclass(frozen=True)
class Config:
    """What is asked of which model."""

    model: str = "coinflip-thinking"
    adapter: str | None = None
    people: int = 3
    texts: int = 3
    """Pairs; each question of a pair is patched in its turn."""
    control_every: int = 1
    """Controls run at every so many layers, counted from the last."""
    seed: int = 4_000_000


SUBJECTS = {
    "coinflip-thinking": Config(),
    "smollm2-135m + coin-flip": Config("smollm2-135m", "coin-flip", control_every=6),
}


@dataclass(frozen=True)
class Result:
    """How far each patch brings the answer over, where both questions of a pair are answered rightly."""

    config: Config
    questions: int
    right: int
    texts: list[str]
    """One question of each pair that is patched."""
    lines: list[dict[str, Any]]
    """place, layer, treatment: n, the mean nld (0 as it was, 1 as the other question), low and high of it, flips."""

    @classmethod
    def of(cls, held: dict[str, Any]) -> "Result":
        """From what the JSON holds."""
        return cls(Config(**held["config"]), held["questions"], held["right"], held["texts"], held["lines"])

    @property
    def frame(self) -> pd.DataFrame:
        return pd.DataFrame(self.lines)

    def table(self, probes: pd.DataFrame | None = None) -> str:
        """The controls, and the mean NLD by layer and place; in brackets the flips, then the probe's accuracy.

        probes: of `coin_state_probe`, whose S at the same layers and places stands beside the patch.
        """
        frame, places = self.frame, list(dict.fromkeys(self.frame.place))
        lines = [f"{self.right} of {self.questions} questions answered rightly; {self.config.people} people.", ""]
        lines += [f"- {text} And with the other coin." for text in self.texts]
        for name in CONTROLS:
            one = frame[frame.treatment == name]
            worst = one.loc[one[["low", "high"]].abs().max(axis=1).idxmax()]
            far = max(worst.low, worst.high, key=abs)
            lines.append(
                f"- {name}: NLD within {abs(far):.3f} of 0 (farthest at {worst.place}, layer {worst.layer}), "
                f"{one.flips.sum()} of {one.n.sum()} answers flip"
            )
        main = frame[frame.treatment == SWAPPED].set_index(["place", "layer"])
        known = {} if probes is None else probes[probes.site == "S"].set_index(["place", "layer"]).accuracy.to_dict()
        lines += ["", f"| layer | {' | '.join(places)} |", "|---" * (len(places) + 1) + "|"]
        for layer in sorted(frame.layer.unique()):
            told = []
            for place in places:
                line = main.loc[place, layer]
                number = known.get((_probed(place), layer))
                beside = "" if number is None else f"; {number:.3f}"
                told.append(f"{line.nld:.3f} ({line.flips} of {line.n}){beside}")
            lines.append(f"| {layer} | {' | '.join(told)} |")
        return "\n".join(lines)

    def figure(self) -> Any:
        return carried_figure(self.frame)


def _probed(place: str) -> int | None:
    """The place's number in `coin_state_probe`."""
    return -1 if place == END else int(place.split()[1]) if place.startswith("person ") else None


def run(config: Config, progress: bool = False) -> Result:
    """Load the model, and patch it."""
    return measure(cp.load_model(config.model, adapter=config.adapter), config, progress)


def measure(lm: CachedLM, config: Config, progress: bool = False) -> Result:
    """Patch the questions of the pairs that are answered rightly. Raises: ValueError for a model at chance."""
    asked = [questions(lm, config, index) for index in range(config.texts)]
    said = cp.run(lm, [example for four in asked for example in four[:2]], **SETTINGS)
    columns = [lm.encode(answer, add_special_tokens=False)[0] for answer in ANSWERS]
    right = [
        said.committed(2 * i + k)[0] == columns[STATES.index(four[k].states[-1])]
        for i, four in enumerate(asked)
        for k in range(2)
    ]
    accuracy = Accuracy(len(right), sum(right), 0, 0.5)
    if accuracy.interval[0] <= accuracy.chance:
        raise ValueError(
            f"{config.model} answers {sum(right)} of {len(right)} questions rightly, no more than chance: which states "
            "its answer uses cannot be asked; give a model that tracks the coin"
        )
    found, kept = [], [i for i in range(config.texts) if right[2 * i] and right[2 * i + 1]]
    patch = _cells if type(lm.new_cache(1, 1)) is KVCache else _runs
    with Progress(2 * len(kept), "patching", "questions", enabled=progress) as bar:
        for i in kept:
            for own in range(2):
                four = asked[i]
                found += patch(lm, four[own], four[1 - own], four[2 + own], config)
                bar.advance()
    by = pd.DataFrame(found).groupby(["place", "layer", "treatment"], sort=False)
    lines = by.agg(
        n=("nld", "size"), nld=("nld", "mean"), low=("nld", "min"), high=("nld", "max"), flips=("flip", "sum")
    )
    texts = [asked[i][0].question.text for i in kept]
    return Result(config, len(right), sum(right), texts, records_of(lines.reset_index()))


def questions(lm: CachedLM, config: Config, index: int) -> tuple[Example, Example, Example, Example]:
    """Heads and tails with the same events, and both again with other names.

    Raises: ValueError where the tokenizer has too few names of one token.
    """
    rng = Random(f"coin state patch/{config.seed}/{index}")
    short = [name for name in NAMES if len(lm.encode(f" {name}", add_special_tokens=False)) == 1]
    if len(short) < 2 * config.people:
        raise ValueError(
            f"{lm.name}: {len(short)} names are one token, {2 * config.people} are needed; ask fewer people"
        )
    names = rng.sample(short, 2 * config.people)
    flips = [rng.random() < 0.5 for _ in range(config.people)]
    a, b, c, d = (
        Example(coin_question(side, list(zip(chosen, flips, strict=True))))
        for chosen in (names[: config.people], names[config.people :])
        for side in STATES
    )
    return a, b, c, d


def places_of(trace: cp.Trace) -> dict[str, list[int]]:
    """Absolute positions of request 0: the word, the token that completes each person's words, and the last one; of a
    model that thinks also the whole chunk of each. Request 1 is the other question of the pair."""
    own, other = (request.prompt_token_ids for request in trace.requests[:2])
    about = cp.probes.labelled(trace)
    places = {WORD: [a == b for a, b in zip(own, other, strict=True)].index(False)}
    places |= {f"person {line.place}": int(line.position) for line in about[about.request_id == 0].itertuples()}
    places[END] = len(own) - 1
    found = {name: [position] for name, position in places.items()}
    if (chunk := getattr(trace.model, "chunk", 0)) > 1 and trace.thought_table is not None:
        for name, position in places.items():
            first = position // chunk * chunk
            found[f"chunk of {name}"] = list(range(first, first + chunk))
    return found


def _treated(states: Mapping[str, Tensor], positions: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
    """By treatment, the vectors [len(positions), m] that take the place of the own ones."""
    own, other, alike = (states[name][list(positions)].float() for name in ("own", "other", "alike"))
    drawn = torch.randn(own.shape, generator=generator)
    length = (other - own).norm(dim=-1, keepdim=True)
    noise = own + drawn * length / drawn.norm(dim=-1, keepdim=True)
    return {SWAPPED: other, "own again": own, "other names": alike, "noise": noise}


def _wanted(lm: CachedLM, config: Config) -> Iterator[tuple[int, str]]:
    """(layer, treatment) of every cell at a place."""
    for layer in range(lm.n_layers):
        yield layer, SWAPPED
        if (lm.n_layers - 1 - layer) % config.control_every == 0:
            yield from ((layer, name) for name in CONTROLS)


def _cells(lm: CachedLM, own: Example, other: Example, alike: Example, config: Config) -> list[dict[str, Any]]:
    """Of a model whose only memory is keys and values: a grid of `cp.patching`, and controls from the same cache."""
    places = places_of(cp.run(lm, [own, other], **SETTINGS))
    ids = [lm.encode(example.prompt_text(lm.tokenizer)) for example in (own, other, alike)]
    answer = tuple(lm.encode(f" {e.states[-1]}", add_special_tokens=False)[0] for e in (other, own))
    at = sorted({positions[0] for positions in places.values()})
    grid = cp.patching.activation(lm, ids[1], ids[0], answer=answer, positions=at, progress=False).table
    swapped = grid.set_index(["layer", "position"])
    with torch.inference_mode():
        clean, base = run_pair(lm, ids[1], ids[0], ())
        runs = {"own": base, "other": clean, "alike": run_once(lm, ids[2])}
        low, high = (difference(read(one.logits[None], answer)[0]) for one in (base, clean))
        found, generator = [], torch.Generator().manual_seed(config.seed)
        for place, (position,) in places.items():
            wanted = [one for one in _wanted(lm, config) if one[1] != SWAPPED]
            treated = {
                layer: _treated({name: one.at("S", layer) for name, one in runs.items()}, [position], generator)
                for layer in dict.fromkeys(layer for layer, _ in wanted)
            }
            cells = [
                cell([Edit(("S", layer), (position,), treated[layer][name].to(lm.dtype))]) for layer, name in wanted
            ]
            said = [difference(one) for one in read(run_cells(lm, base, cells), answer)]
            found += [
                dict(place=place, layer=layer, treatment=SWAPPED, nld=line.nld, flip=bool(line.flip))
                for layer in range(lm.n_layers)
                for line in [swapped.loc[layer, position]]
            ]
            found += [
                dict(
                    place=place,
                    layer=layer,
                    treatment=name,
                    nld=(one - low) / (high - low),
                    flip=(one > 0) != (low > 0),
                )
                for (layer, name), one in zip(wanted, said, strict=True)
            ]
    return found


def _runs(lm: CachedLM, own: Example, other: Example, alike: Example, config: Config) -> list[dict[str, Any]]:
    """Of a model that thinks: a run under an intervention for every cell, in which later thoughts follow from it."""
    base = cp.run(lm, [own, other, alike], **SETTINGS)
    answer = tuple(lm.encode(f" {e.states[-1]}", add_special_tokens=False)[0] for e in (other, own))
    generator = torch.Generator().manual_seed(config.seed)
    cells, edits = [], []
    for place, positions in places_of(base).items():
        for layer, name in _wanted(lm, config):
            states = {who: base.states("S", layer, i) for i, who in enumerate(("own", "other", "alike"))}
            vectors = _treated(states, positions, generator)[name]
            where = dict(request_id=len(cells), site="S", layer=layer, positions=positions)
            edits.append(cp.interventions.replace(vectors, **where))
            cells.append((place, layer, name))
    end, last = base.requests[0].num_prompt_tokens - 1, lm.n_layers - 1
    kept = cp.CaptureConfig("S", layers=(last,), positions=(end,))
    trace = cp.run(lm, [own] * len(cells), interventions=edits, **{**SETTINGS, "capture": kept})

    def apart(run: cp.Trace, request_id: int) -> float:
        rows = run.rows(request_id, "committed")
        logits = lm.read_out(run.vectors("S", last, rows[rows.position == end])[0]).double()
        return float(logits[answer[0]] - logits[answer[1]])

    low, high = apart(base, 0), apart(base, 1)
    said = [apart(trace, i) for i in range(len(cells))]
    return [
        dict(place=place, layer=layer, treatment=name, nld=(one - low) / (high - low), flip=(one > 0) != (low > 0))
        for (place, layer, name), one in zip(cells, said, strict=True)
    ]


def main() -> None:
    command_of_subjects(__doc__, SUBJECTS, run)


if __name__ == "__main__":
    main()
