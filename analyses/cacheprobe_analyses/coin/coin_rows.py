"""Measures which cache slots carry the state of the coin, by changing slots and computing the answer again.

    python -m cacheprobe_analyses.coin_rows --json analyses/results/coin-rows.json

Pairs of coin-flip questions differ only in the word heads or tails, so their answers are opposite. All tokens of a
question but the last are computed. Then keys and values in the slots of these tokens are changed, and the last token is
computed from them. One slot at a time is changed (unit "row"), or all slots of a span of tokens (unit "span"). A slot
is swapped for that of the other question, or masked. Controls: the same keys and values again ("own again"); those of a
question with other names and the same states ("other names"); the own ones plus random noise of the same length as the
swap's change, in every layer and head ("noise").
Raises an error for a model whose accuracy on the questions is not above chance.
Source: swaps are interchange interventions (Geiger et al. 2021, arXiv 2106.02997) of cache slots.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pandas as pd
import torch

import cacheprobe as cp
from cacheprobe.core.terminal import Progress
from cacheprobe.kvcache.surgery import KVSnapshot
from cacheprobe.models.base import CachedLM
from cacheprobe.tasks.base import Accuracy, Question
from cacheprobe.tasks.coin_flip import ANSWERS, STATES, coin_question
from cacheprobe.tasks.drawing import HELD_OUT_NAMES
from cacheprobe.views import coin_rows_figure
from cacheprobe_analyses.coin.question_parts import parts_of
from cacheprobe_analyses.command import command

TREATMENTS = ("swapped", "masked", "own again", "other names", "noise")
_BATCH = dict(max_new_tokens=1, capacity=96, progress=False)


@dataclass(frozen=True)
class Config:
    """Holds the settings of the analysis: the model and adapter, and the questions."""

    model: str = "smollm2-135m"
    adapter: str | None = "coin-flip"
    people: tuple[int, ...] = (1, 2, 3, 4)
    texts: int = 3
    """Number of pairs for each number of people; both questions of a pair are changed, one after the other."""
    seed: int = 4_000_000


@dataclass(frozen=True)
class Result:
    """Holds how far each change of the cache moves the answer to the other question's, over the pairs of which both
    questions are answered correctly."""

    right: dict[str, int]
    """Number of questions answered correctly without a change, by number of people."""
    questions: dict[str, int]
    effects: list[dict[str, Any]]
    """A dict for each number of people, unit ("row" for one slot, or "span"), where (its name) and treatment: n, total
    and nld (sum and mean of the normalised logit difference: 0 as without a change, 1 as the other question) and flips
    (number of answers that change)."""

    def frame(self) -> pd.DataFrame:
        """Returns the effects as a DataFrame, for `cp.plots.coin_rows_figure`."""
        return pd.DataFrame(self.effects)

    def figure(self) -> Any:
        return coin_rows_figure(self.frame())

    def table(self) -> str:
        lines = [f"{k} people: {self.right[k]} of {self.questions[k]} questions answered rightly" for k in self.right]
        effects = self.frame().groupby(["unit", "where", "treatment"], sort=False)[["n", "total", "flips"]].sum()
        for (unit, where, treatment), row in effects.iterrows():
            share = f"{int(row.flips)} of {int(row.n)} answers flip"
            lines.append(f"{unit} {where}, {treatment}: nld {row.total / row.n:.3f}, {share}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Read:
    """Holds a question that the model has read: its tokens, the cached keys and values of all tokens but the last, and
    the logits of the two answers after the last token."""

    question: Question
    token_ids: tuple[int, ...]
    rows: KVSnapshot
    logits: tuple[float, float]
    """Logits of heads and tails."""

    @property
    def is_right(self) -> bool:
        return STATES[int(self.logits[1] > self.logits[0])] == self.question.states[-1]


def run(config: Config, progress: bool = False) -> Result:
    """Loads the model, computes all pairs of questions, and changes slots of the pairs that are answered correctly.
    Returns a Result."""
    return measure(cp.load_model(config.model, adapter=config.adapter), config, progress)


def measure(lm: CachedLM, config: Config, progress: bool = False) -> Result:
    """Runs the analysis on a loaded model, as `run`; returns a Result. Raises: ValueError for a model whose accuracy is
    not above chance."""
    asked = {k: [read_pair(lm, k, i, config.seed) for i in range(config.texts)] for k in config.people}
    right = {k: [question.is_right for pair in pairs for question in pair[:2]] for k, pairs in asked.items()}
    known = [is_right for questions in right.values() for is_right in questions]
    accuracy = Accuracy(len(known), sum(known), 0, 0.5)
    if accuracy.interval[0] <= accuracy.chance:
        raise ValueError(
            f"{config.model} answers {sum(known)} of {len(known)} questions rightly, no more than chance, so "
            "no slot can be said to carry the coin; give adapter='coin-flip', or another model that tracks it"
        )
    chosen = [
        (k, own, other, alike, config.seed + i)
        for k, pairs in asked.items()
        for i, (heads, tails, other_heads, other_tails) in enumerate(pairs)
        if heads.is_right and tails.is_right
        for own, other, alike in ((heads, tails, other_heads), (tails, heads, other_tails))
    ]
    found = []
    with Progress(len(chosen), "changing slots", "questions", enabled=progress) as bar:
        for k, own, other, alike, seed in chosen:
            found += [{"people": k, **effect} for effect in effects_of(lm, own, other, alike, seed=seed)]
            bar.advance(note=f"{k} people")
    by = pd.DataFrame(found).groupby(["people", "unit", "where", "treatment"], sort=False)
    summed = by.agg(n=("nld", "size"), total=("nld", "sum"), nld=("nld", "mean"), flips=("flip", "sum")).reset_index()
    questions = {str(k): len(v) for k, v in right.items()}
    return Result({str(k): sum(v) for k, v in right.items()}, questions, summed.to_dict("records"))


def read_pair(lm: CachedLM, people: int, index: int, seed: int) -> tuple[Read, Read, Read, Read]:
    """Returns four questions as Read: heads and tails with the same events, and both again with other names. All have
    the same number of tokens.

    Raises: ValueError if the tokenizer has too few names of one token, or gives the questions different numbers of
    tokens.
    """
    rng = Random(f"coin rows/{seed}/{people}/{index}")
    short = [name for name in HELD_OUT_NAMES if len(lm.encode(f" {name}", add_special_tokens=False)) == 1]
    if len(short) < 2 * people:
        raise ValueError(
            f"{lm.name}: {len(short)} names are one token, {2 * people} are needed; ask about fewer people"
        )
    names = rng.sample(short, 2 * people)
    flips = [rng.random() < 0.5 for _ in range(people)]
    questions = [
        coin_question(side, list(zip(chosen, flips, strict=True)))
        for chosen in (names[:people], names[people:])
        for side in STATES
    ]
    ids = [lm.encode(question.text) for question in questions]
    if len({len(one) for one in ids}) > 1:
        raise ValueError(f"{lm.name}: the questions of a pair have {sorted(map(len, ids))} tokens; slots do not match")
    rows = [cp.kv_snapshot(lm, one, capacity=_BATCH["capacity"]) for one in ids]
    logits = _logits(lm, list(zip(ids, rows, strict=True)))
    a, b, c, d = (Read(*one) for one in zip(questions, ids, rows, logits, strict=True))
    return a, b, c, d


def effects_of(lm: CachedLM, own: Read, other: Read, alike: Read, seed: int) -> list[dict[str, Any]]:
    """Returns a list of dicts, one for each changed slot or span and each treatment: unit, where, treatment, nld
    (normalised logit difference), flip (whether the answer changes).

    own: the question whose slots are changed.  other: its pair.  alike: the same states with other names.
    """
    named = list(_places(lm, own))
    noisy = _noisy(own.rows, other.rows, seed)
    changed = [
        (unit, where, treatment, _treated(own, {"swapped": other.rows, "other names": alike.rows, "noise": noisy,
                                                "own again": own.rows}, treatment, positions))
        for unit, where, positions in named
        for treatment in TREATMENTS
    ]  # fmt: skip
    logits = _logits(lm, [(own.token_ids, rows) for *_, rows in changed])
    sign = 1 if own.question.states[-1] == STATES[0] else -1
    start, end = (sign * (one.logits[0] - one.logits[1]) for one in (own, other))
    apart = [sign * (heads - tails) for heads, tails in logits]
    return [
        dict(unit=unit, where=where, treatment=treatment, nld=(start - now) / (start - end), flip=now < 0)
        for (unit, where, treatment, _), now in zip(changed, apart, strict=True)
    ]


def _places(lm: CachedLM, own: Read) -> Iterator[tuple[str, str, list[int]]]:
    """Yields (unit, where, positions): each slot by itself, then each span, then all slots together."""
    parts = parts_of(lm, own.question)[: len(own.rows)]
    for position, (_, slot_name) in enumerate(parts):
        yield "row", slot_name, [position]
    spans: dict[str, list[int]] = {}
    for position, (span, _) in enumerate(parts):
        spans.setdefault(span, []).append(position)
    yield from (("span", name, positions) for name, positions in spans.items())
    yield "span", "all rows", list(range(len(parts)))


def _treated(own: Read, donors: Mapping[str, KVSnapshot], treatment: str, positions: Sequence[int]) -> KVSnapshot:
    return own.rows.masked(positions) if treatment == "masked" else own.rows.spliced(donors[treatment], positions)


def _noisy(own: KVSnapshot, other: KVSnapshot, seed: int) -> KVSnapshot:
    """Returns a copy of `own` with noise: keys and values are moved as far as those of `other` are away, in a random
    direction for every layer, head and position."""
    generator = torch.Generator().manual_seed(seed)

    def moved(mine: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
        drawn = torch.randn(mine.shape, generator=generator)
        return mine + drawn * (theirs - mine).norm(dim=-1, keepdim=True) / drawn.norm(dim=-1, keepdim=True)

    keys, values = (
        tuple(moved(a, b) for a, b in zip(mine, theirs, strict=True))
        for mine, theirs in ((own.keys, other.keys), (own.values, other.values))
    )
    return replace(own, keys=keys, values=values)


def _logits(lm: CachedLM, asked: Sequence[tuple[Sequence[int], KVSnapshot]]) -> list[tuple[float, float]]:
    """Returns the logits of heads and tails after each text as a list; the last token of a text is computed from the
    given cached keys and values."""
    last = lm.n_layers - 1
    columns = [lm.encode(answer, add_special_tokens=False)[0] for answer in ANSWERS]
    requests = [cp.Request(list(ids), cached=rows, own_fingerprint=True) for ids, rows in asked]
    trace = cp.run(lm, requests, capture="S", layers=[last], **_BATCH)
    states = torch.stack([trace.states("S", last, i)[0] for i in range(len(requests))])
    return [tuple(row) for row in lm.read_out(states)[:, columns].double().tolist()]


def main() -> None:
    command(__doc__, Config, run, texts="pairs for each number of people")


if __name__ == "__main__":
    main()
