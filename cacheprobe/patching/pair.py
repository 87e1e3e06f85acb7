"""Both unpatched runs of a pair, and the two answers that they are told apart by."""

from collections.abc import Iterable, Mapping
from typing import Any

from cacheprobe.models.base import CachedLM
from cacheprobe.patching.asked import as_answer
from cacheprobe.patching.grid import difference
from cacheprobe.patching.parts import Parts
from cacheprobe.patching.runs import Run, read, run_once

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


def parts_of(store: Any, model: CachedLM, asked: Mapping[str, Any]) -> Parts:
    """The folder of finished cells, for exactly this question to exactly this model; without a folder, none."""
    return Parts(store, {} if store is None else {**asked, "fingerprint": model.fingerprint()})
