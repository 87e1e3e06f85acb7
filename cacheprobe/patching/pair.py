"""Both unpatched runs of a pair, and the two answers that they are told apart by."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cacheprobe.core.token_text import visible
from cacheprobe.models.base import CachedLM
from cacheprobe.patching.asked import as_answer
from cacheprobe.patching.grid import Grid, difference, pair_meta, pair_table
from cacheprobe.patching.parts import Parts
from cacheprobe.patching.runs import Run, read, run_once
from cacheprobe.patching.sweep import Group, sweep

_LEAST_DIFFERENCE = 1e-4
"""Of the two runs' logit differences: float32 rounds logits by less, and NLD divides by it."""


def run_pair(
    model: CachedLM, clean: tuple[int, ...], corrupt: tuple[int, ...], sites: Iterable[str]
) -> tuple[Run, Run]:
    """The clean and the corrupted run, alike bit for bit as far as their texts are.

    Both are computed from there on, in one shape: their difference, which NLD divides by, is then rounded alike.
    """
    whole = run_once(model, corrupt, sites)
    shared = (whole, whole.begins_like(clean))
    return run_once(model, clean, sites, after=shared), run_once(model, corrupt, sites, after=shared)


def answers(model: CachedLM, answer: Any, clean: Run, corrupt: Run) -> tuple[int, int]:
    """The two answers' token ids; by default the first choices of the two runs.

    Raises: ValueError where they are the same, or where both runs put the same difference between them.
    """
    if answer is None:
        answer = [int(run.logits.argmax()) for run in (clean, corrupt)]
        if answer[0] == answer[1]:
            (text,) = model.token_texts(answer[:1])
            raise ValueError(f"both prompts go on with {text!r}, so there is nothing to bring over; give answer=(a, b)")
    if isinstance(answer, str) or len(pair := tuple(answer)) != 2:
        raise ValueError(f"answer must be two tokens, the clean one and the other, got {answer!r}")
    first, second = (as_answer(model, one) for one in pair)
    apart = [difference(read(run.logits[None], (first, second))[0]) for run in (clean, corrupt)]
    if not abs(apart[0] - apart[1]) >= _LEAST_DIFFERENCE:
        raise ValueError(
            f"both prompts put {apart[0]:.4f} between the answers {first} and {second}, so NLD has no scale; give an "
            "answer=(a, b) that the prompts differ in"
        )
    return first, second


def grid_of_pair(
    model: CachedLM,
    kind: str,
    site: str,
    axes: Sequence[str],
    runs: tuple[Run, Run],
    answer: tuple[int, int],
    layers: Sequence[int],
    groups: Sequence[Group],
    store: Any,
    progress: bool,
) -> Grid:
    """Run the groups of cells of a clean and a corrupted run, or read them from `store`; axes: what numbers a cell."""
    clean, corrupt = (run.token_ids for run in runs)
    asked = dict(kind=kind, site=site, layers=layers, answer=answer, clean=clean, corrupt=corrupt)
    said = dict(sorted(sweep(model, groups, answer, parts_of(store, model, asked), progress).items()))
    ends = (read(run.logits[None], answer)[0] for run in runs)
    table = pair_table(said, axes, [visible(text) for text in model.token_texts(corrupt)], *ends)
    return Grid(table, pair_meta(model, kind, site, runs, answer))


def parts_of(store: Any, model: CachedLM, asked: Mapping[str, Any]) -> Parts:
    """The folder of finished cells, for exactly this question to exactly this model; without a folder, none."""
    return Parts(store, {} if store is None else {**asked, "fingerprint": model.fingerprint()})
