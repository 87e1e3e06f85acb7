"""Measures on this machine what drafts and verify passes cost, one request at a time."""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from statistics import fmean, median
from typing import Unpack

import pandas as pd

from cacheprobe.analysis.draft_acceptance import names_of
from cacheprobe.core.config import EngineOptions
from cacheprobe.core.records import Observer, StepRecord
from cacheprobe.core.terminal import Progress
from cacheprobe.core.values import whole_number
from cacheprobe.engine.drafters.base import Drafter
from cacheprobe.engine.execution import prepare
from cacheprobe.engine.plan import make_plan
from cacheprobe.engine.shapes import DRAFTED_WINDOW
from cacheprobe.models.base import CachedLM
from cacheprobe.models.settings import hold_model
from cacheprobe.trace.tables.schema import typed


class StepClock(Observer):
    """Measures each step of a run, with all that happens since the step before: choices, commits, the drafter."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._last = clock, clock()
        self.verify: list[tuple[float, int]] = []
        """(seconds, number of draft tokens) of each verify pass."""
        self.drafts: list[tuple[float, int]] = []
        """(seconds, number of draft tokens) of each draft step."""
        self.plain: list[tuple[float, int]] = []
        """(seconds, committed tokens) of each step that commits and is no prefill."""

    def on_step(self, record: StepRecord) -> None:
        """Stores the seconds since the last step."""
        now = self._clock()
        seconds, self._last = now - self._last, now
        if record.phase == "prefill":
            return
        if record.phase == "verify":
            self.verify.append((seconds, sum(len(verdict.draft_token_ids) for verdict in record.verdicts)))
        else:
            self.drafts.append((seconds, sum(len(token_ids) for _, token_ids in record.proposed)))
        num_committed = sum(len(token_ids) for _, token_ids in record.committed)
        num_committed += sum(len(verdict.committed) for verdict in record.verdicts)
        if num_committed:
            self.plain.append((seconds, num_committed))

    @property
    def seconds(self) -> float:
        """Seconds of all steps but the prefill."""
        return sum(seconds for seconds, _ in (*self.verify, *self.drafts))


def draft_costs(
    model: CachedLM,
    prompts: Iterable[object],
    drafters: Drafter | Sequence[Drafter],
    *,
    windows: "int | Sequence[int]" = (2, 4, 8, 16),
    max_new_tokens: int = 32,
    repeats: int = 3,
    progress: bool = True,
    **options: Unpack[EngineOptions],
) -> pd.DataFrame:
    """Measures verify passes, draft tokens and plain decoding in short runs on this machine. Returns a DataFrame with
    one line for each drafter and window, for `cp.analysis.expected_speedup`.

    Each prompt is run alone, greedily and without capture, once with each drafter and window and once without a
    drafter, and all this `repeats` times in turn, so that other load on the machine meets all alike.
    Columns: drafter, settings, layer, lens (of an EarlyExit), window, verify_seconds (of a verify pass with a draft;
    without one, if no pass had any), undrafted_seconds (of one without a draft, which can be narrower; NaN if there was
    none), draft_seconds (of one draft token; NaN if none was drafted), plain_seconds (of a token without a drafter).
    Calls of the drafter that gave no token are part of the passes. A step's time is its median over the repeats; costs
    are means over steps, so that costs times counts give the time of these runs.
    options: EngineConfig fields as of `cp.run`, such as group.
    Raises: ValueError for settings that do not fit, as `cp.run`.
    """
    listed = list(drafters) if isinstance(drafters, Sequence) else [drafters]
    sizes = [windows] if isinstance(windows, int) else list(windows)
    if whole_number("repeats", repeats) < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    texts = list(prompts)
    if not texts or not listed:
        raise ValueError("there is nothing to measure: give at least one prompt and one drafter")
    if whole_number("max_new_tokens", max_new_tokens) < 3:
        raise ValueError(f"max_new_tokens must be at least 3, so that a pass drafts, got {max_new_tokens}")
    if len({tuple(names_of(drafter).items()) for drafter in listed}) < len(listed):
        raise ValueError("two of the drafters have the same name, layer, lens and settings; measure one at a time")
    kinds: list[tuple[Drafter | None, int | None]] = [(None, None)]
    kinds += [(drafter, window) for drafter in listed for window in sizes]
    clocks: dict[int, dict[int, list[StepClock]]] = {number: {} for number in range(len(kinds))}
    with Progress((repeats + 1) * len(texts) * len(kinds), "measuring", "runs", enabled=progress) as bar:
        for repeat in range(repeats + 1):  # the first one allocates, and is not counted
            for index, text in enumerate(texts):
                for number, (drafter, window) in enumerate(kinds):
                    own: EngineOptions = options if window is None else {**options, "window": window}
                    clock = timed_run(model, text, drafter, max_new_tokens, own)
                    if repeat:
                        clocks[number].setdefault(index, []).append(clock)
                    bar.advance()
    plain = _of_token([step for of in clocks[0].values() for step in _medians(clock.plain for clock in of)])
    if plain != plain:
        raise ValueError("every prompt ended with its first token, so nothing was measured; give other prompts")
    lines = [
        {**names_of(drafter), "window": window, **_costs(list(clocks[number].values())), "plain_seconds": plain}
        for number, (drafter, window) in enumerate(kinds)
        if drafter is not None
    ]
    return typed(lines, "draft_costs")


def timed_run(
    model: CachedLM, prompt: object, drafter: Drafter | None, max_new_tokens: int, options: EngineOptions
) -> StepClock:
    """Runs one prompt alone, greedily and without capture; returns the StepClock of its steps."""
    settings = {"draft_length": DRAFTED_WINDOW, **options, "drafter": drafter, "max_batch": 1, "capture": None}
    settings["max_new_tokens"] = max_new_tokens
    run, clock = prepare(make_plan(model, [prompt], settings, max_in_flight=1)), StepClock()
    with hold_model(run.plan.model), closing(run.rounds(clock)) as steps:
        for _ in steps:
            pass
    return clock


def _costs(texts: Sequence[Sequence[StepClock]]) -> dict[str, float]:
    """Returns the costs of one drafter and window, without plain_seconds. texts: the clocks of each text's repeats."""
    verify = [step for of in texts for step in _medians(clock.verify for clock in of)]
    drafts = [step for of in texts for step in _medians(clock.drafts for clock in of)]
    of_empty = sum(seconds for seconds, count in drafts if not count) / len(verify) if verify else 0.0
    drafted, undrafted = ([seconds for seconds, count in verify if bool(count) is has] for has in (True, False))
    return {
        "verify_seconds": _mean(drafted or undrafted) + of_empty,
        "undrafted_seconds": _mean(undrafted) + of_empty,
        "draft_seconds": _of_token([step for step in drafts if step[1]]),
    }


def _medians(repeats: Iterable[Sequence[tuple[float, int]]]) -> list[tuple[float, int]]:
    """Returns (median of the seconds, count) of each step of a run that was repeated."""
    return [(median(seconds for seconds, _ in step), step[0][1]) for step in zip(*repeats, strict=False)]


def _of_token(steps: Sequence[tuple[float, int]]) -> float:
    """Returns the seconds of one token, of steps (seconds, tokens); NaN without a token."""
    count = sum(count for _, count in steps)
    return sum(seconds for seconds, _ in steps) / count if count else float("nan")


def _mean(seconds: Sequence[float]) -> float:
    """Returns the mean; NaN without a number."""
    return fmean(seconds) if seconds else float("nan")
