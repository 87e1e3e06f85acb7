"""By what does a thought go wrong far beyond the trained lengths: by how far back the text goes, or how much it is?

    python -m cacheprobe_analyses.crowding_or_distance --json analyses/results/crowding-or-distance.json

Coin models read texts of a thousand operations under gold states; a thought's margin is the logit of its right first
token less the largest of all others. Where the first of the models is wrong, every model reads the chunk once more with
the attention of its last two chunks changed: to few earlier tokens, near ones or far ones, to all of them at the
distances of near ones, and to few near ones that count as many. Texts are others than those of `thinking_states_table`,
whose trained models are read.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cacheprobe.core.terminal import Progress
from cacheprobe.models.thinking.blocks import rotate
from cacheprobe.models.thinking.model import ThinkingModel, thought_table
from cacheprobe.tasks import Annotated
from cacheprobe.tasks.drawing import NAMES
from cacheprobe.training.loop import one_thread
from cacheprobe.training.thinking.evaluate import READ_AT_ONCE
from cacheprobe.training.thinking.losses import collate
from cacheprobe.training.thinking.run import TEST_SEED, Trained
from cacheprobe_analyses.command import command
from cacheprobe_analyses.thinking.thinking_states_table import Config as Table
from cacheprobe_analyses.thinking.thinking_states_table import trained_arm

KEPT = 44
"""Tokens that "few" are: with the two chunks and those beside them about a text of the trained lengths."""
BESIDE = 8
"""Tokens before the last two chunks that stay as they are."""
BANDS = (0, 100, 400, 700, 1000)


class Way(NamedTuple):
    """What the last two chunks see of the text before those beside them."""

    tokens: str
    """all, the newest KEPT, or KEPT of all evenly spread."""
    is_near: bool = False
    """Whether all are brought to the distances of the newest KEPT, over and over."""
    counts_as_many: bool = False
    """Whether each counts as often as it takes for them to be as many as all."""


WAYS = {
    "untouched": Way("all"),
    "few, near": Way("newest"),
    "few, far": Way("spread"),
    "many, near": Way("all", is_near=True),
    "few, near, counted as many": Way("newest", counts_as_many=True),
}


@dataclass(frozen=True)
class Config:
    """What is asked, and where the trained models are."""

    models: tuple[tuple[str, int], ...] = (
        ("tiny", 2),
        ("tiny", 0),
        ("tiny", 1),
        *(("attention-crowding", seed) for seed in range(3)),
    )
    """Presets and seeds; the wrong thoughts of the first are looked into."""
    folder: Path = Table.folder
    operations: int = 1000
    flip_probabilities: tuple[float, ...] = (0.5, 0.9)
    texts: int = 8
    """For each flip probability."""
    seed: int = TEST_SEED + 50_000


@dataclass(frozen=True)
class Result:
    """By model: texts with a wrong thought, wrong thoughts, the least margin by chunk; and what was found where the
    first is wrong."""

    operations: int
    texts: int
    models: dict[str, dict[str, Any]]
    kinds: dict[str, int]
    """Wrong thoughts of the first model that have text before what stands beside them, by the words of the chunk before
    and their own, and the state before."""
    ways: dict[str, dict[str, dict[str, float]]]
    """By model and way: places, those whose thought is wrong, the median margin."""

    def table(self) -> str:
        """In Markdown: the least margin of any thought, by its chunk."""
        bands = list(next(iter(self.models.values()))["least"])
        head = ["model", "texts with a wrong thought", "wrong thoughts", *(f"chunks {band}" for band in bands)]
        lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        for name, found in self.models.items():
            least = " | ".join(f"{margin:.1f}" for margin in found["least"].values())
            lines.append(f"| {name} | {found['texts']} of {self.texts} | {found['wrong']} | {least} |")
        return "\n".join(lines)

    def ways_table(self) -> str:
        """In Markdown: wrong thoughts and median margin where the first model is wrong."""
        lines = [f"| model | {' | '.join(WAYS)} |", "|---" * (len(WAYS) + 1) + "|"]
        for name, ways in self.ways.items():
            told = [f"{w['wrong']:.0f} of {w['places']:.0f} ({w['median']:.1f})" for w in ways.values()]
            lines.append(f"| {name} | {' | '.join(told)} |")
        return "\n".join(lines)

    def kinds_listed(self) -> list[str]:
        return [f"{count} wrong: {kind}" for kind, count in self.kinds.items()]


@torch.inference_mode()
def margins(model: ThinkingModel, items: Sequence[Annotated]) -> Iterator[Tensor]:
    """Of each text, the margin of each thought's first token, in logits."""
    at_once = max(1, READ_AT_ONCE // max(len(item.token_ids) for item in items))
    for start in range(0, len(items), at_once):
        group = items[start : start + at_once]
        batch = collate(group, "thinking", model.config.pad_id)
        _, logits = model(batch.token_ids, batch.thoughts)
        assert logits is not None and batch.thoughts is not None
        found = _margin(logits[:, :, 0], batch.thoughts[:, :, 0])
        yield from (row[: len(item.thoughts)].clone() for row, item in zip(found, group, strict=True))


def _margin(logits: Tensor, right: Tensor) -> Tensor:
    others = logits.scatter(-1, right[..., None], -torch.inf)
    return logits.gather(-1, right[..., None])[..., 0] - others.amax(-1)


@torch.inference_mode()
def reread(model: ThinkingModel, item: Annotated, chunk: int, ways: dict[str, Way]) -> dict[str, float]:
    """The margin of one chunk's thought, on each way. Everything before its last two chunks is read as it is."""
    c = model.config.chunk
    end, begin = (chunk + 1) * c, (chunk - 1) * c
    ids, gold = torch.tensor(item.token_ids[:end])[None], thought_table([item.thoughts[: chunk + 1]], 0)
    positions, states = torch.arange(end)[None], model.states_of(gold, end)
    held: dict[int, tuple[Tensor, Tensor]] = {}

    def keep(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, None]:
        held[layer] = keys, values
        return keys, values, None

    model.loop(model.enter(ids, positions, keep), states, positions, keep)
    out = {}
    for name, way in ways.items():
        seen, moved, bias = _seen(way, begin - BESIDE)
        beside = torch.arange(begin - BESIDE, begin)
        own = torch.full((end - begin, end - begin), -torch.inf).triu(1)
        mask = torch.cat([bias.expand(len(own), -1), torch.zeros(len(own), BESIDE), own], 1)[None, None]

        def memory(layer: int, keys: Tensor, values: Tensor, seen=seen, moved=moved, beside=beside, mask=mask):
            old_keys, old_values = held[layer]
            # turning a key that is turned already moves it
            far = rotate(old_keys[:, :, seen], moved[None], model.config.rope_theta)
            all_keys = torch.cat([far, old_keys[:, :, beside], keys], 2)
            return all_keys, torch.cat([old_values[:, :, seen], old_values[:, :, beside], values], 2), mask

        entered = model.enter(ids[:, begin:], positions[:, begin:], memory)
        hidden = model.loop(entered, states[:, begin:], positions[:, begin:], memory)
        logits = model.think(hidden[:, -c:], torch.zeros(1, 0, dtype=torch.long))[:, -1]
        out[name] = float(_margin(logits, gold[:, chunk, 0]))
    return out


def _seen(way: Way, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of `count` tokens: which are seen, by how much they are moved forward, and their bias."""
    every = torch.arange(count)
    if way.tokens == "newest":
        seen = every[-KEPT:]
    elif way.tokens == "spread":
        seen = torch.linspace(0, count - 1, min(KEPT, count)).long()
    else:
        seen = every
    back = count - 1 - seen
    moved = back - back % KEPT if way.is_near else torch.zeros_like(seen)
    times = count / len(seen) if way.counts_as_many else 1.0
    return seen, moved, torch.full((len(seen),), times).log()


@one_thread()
def run(config: Config, progress: bool = False) -> Result:
    """Read the texts with every model, and the first one's wrong places on every way."""
    models: dict[str, dict[str, Any]] = {}
    ways: dict[str, dict[str, dict[str, float]]] = {}
    places: list[tuple[int, int]] = []
    kinds: Counter[str] = Counter()
    with Progress(len(config.models), "reading", "models", enabled=progress) as bar:
        for preset, seed in config.models:
            name = f"{preset} seed {seed}"
            trained, _ = trained_arm(config.folder, "coin-flip", preset, "thinking", seed)
            items = [
                item
                for p in config.flip_probabilities
                for item in trained.items((config.operations,), config.texts, config.seed, flip_probability=p)
            ]
            found = list(margins(trained.model, items))
            wrong = [(i, int(k)) for i, row in enumerate(found) for k in (row < 0).nonzero()[:, 0]]
            models[name] = {"texts": len({i for i, _ in wrong}), "wrong": len(wrong), "least": _least(found)}
            if not ways:
                places = [(i, k) for i, k in wrong if (k - 1) * trained.model.config.chunk > BESIDE]
                kinds.update(_kind(trained, items[i], k) for i, k in places)
            read = [reread(trained.model, items[i], k, WAYS) for i, k in places]
            ways[name] = {
                way: {
                    "places": len(read),
                    "wrong": sum(at[way] < 0 for at in read),
                    "median": round(median([at[way] for at in read] or [0.0]), 2),
                }
                for way in WAYS
            }
            bar.advance(note=name)
    texts = config.texts * len(config.flip_probabilities)
    return Result(config.operations, texts, models, dict(kinds.most_common()), ways)


def _least(found: Sequence[Tensor]) -> dict[str, float]:
    out = {}
    for low, high in zip(BANDS, (*BANDS[1:], None), strict=True):
        parts = [part for row in found if len(part := row[low:high])]
        if parts:
            out[f"{low} on" if high is None else f"{low} to {high - 1}"] = round(float(torch.cat(parts).min()), 2)
    return out


def _kind(trained: Trained, item: Annotated, chunk: int) -> str:
    c, names = item.chunk, set(NAMES)

    def words(at: int) -> str:
        told: Any = trained.tokenizer.convert_ids_to_tokens(list(item.token_ids[at * c : (at + 1) * c]))
        return " ".join("NAME" if word in names else word for word in told)

    state = trained.tokenizer.decode(list(item.thoughts[chunk - 1][:-1]))
    return f"'{words(chunk - 1)}' before '{words(chunk)}', the state before being {state}"


def main() -> None:
    def shown(result: Result) -> str:
        return "\n".join([result.table(), "", *result.kinds_listed(), "", result.ways_table()])

    command(__doc__, Config, run, shown, folder="where trained models are, or go", texts="for each flip probability")


if __name__ == "__main__":
    main()
