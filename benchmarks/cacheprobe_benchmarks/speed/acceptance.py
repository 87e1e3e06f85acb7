"""Does a stored run tell how fast drafts would be? Expected passes and speed-ups, over those of real drafted runs.

SmolLM2 in float32, greedy, coin prompts one by one, without capture. The expected numbers come from one undrafted run
with lens readings, `cp.analysis.acceptance` and the costs that `cp.draft_costs` measures in the same round.
"""

from statistics import median
from typing import Any

import pandas as pd
import torch

import cacheprobe as cp
from cacheprobe.engine.draft_costs import StepClock, draft_costs, timed_run
from cacheprobe_benchmarks.shared.machine import machine, measuring
from cacheprobe_benchmarks.shared.workload import stored_prompts

WINDOW = 8
NEW_TOKENS, NUM_PROMPTS = 48, 3
DRAFTERS = {"early exit 26": cp.drafters.EarlyExit(layer=26), "ngram": cp.drafters.NGram(length=WINDOW - 1)}
SMALL = {"new_tokens": 4, "num_prompts": 1, "drafters": {"early exit 1": cp.drafters.EarlyExit(layer=1)}}


def run(
    rounds: int, *, new_tokens: int = NEW_TOKENS, num_prompts: int = NUM_PROMPTS, drafters: dict[str, Any] = DRAFTERS
) -> dict[str, Any]:
    """By drafter: expected_over_real passes (1 if the counts are equal) and speed-up (median over rounds), with both
    speed-ups beside it."""
    torch.set_num_threads(2)
    model = cp.load_model("smollm2-135m", dtype="float32")
    prompts = stored_prompts("coin")[:num_prompts]
    trace = cp.run(model, prompts, capture="Z", max_new_tokens=new_tokens, progress=False)
    table = cp.analysis.acceptance(trace, list(drafters.values()), windows=WINDOW)
    expected: dict[str, list[float]] = {name: [] for name in drafters}
    real: dict[str, list[float]] = {name: [] for name in drafters}
    passes: dict[str, float] = {}
    settings = dict(windows=WINDOW, max_new_tokens=new_tokens, repeats=1, progress=False)
    with measuring(rounds * (1 + num_prompts)) as bar:
        for _ in range(rounds):
            costs = draft_costs(model, prompts, list(drafters.values()), **settings)
            bar.advance()
            clocks: dict[str | None, list[StepClock]] = {name: [] for name in (None, *drafters)}
            for prompt in prompts:
                for name in clocks:
                    drafter, shapes = (drafters[name], {"window": WINDOW}) if name else (None, {})
                    clocks[name].append(timed_run(model, prompt, drafter, new_tokens, shapes))
                bar.advance()
            times = cp.analysis.expected_speedup(table, costs)
            plain = sum(clock.seconds for clock in clocks[None])
            for name, drafter in drafters.items():
                own = _own(times, drafter)
                expected[name].append(float(own.plain_seconds.sum() / own.seconds.sum()))
                real[name].append(plain / sum(clock.seconds for clock in clocks[name]))
                passes[name] = float(own.passes.sum()) / sum(len(clock.verify) for clock in clocks[name])
    return {
        "benchmark": "acceptance",
        "rounds": rounds,
        "new_tokens": new_tokens,
        "window": WINDOW,
        "passes_expected_over_real": {name: round(ratio, 3) for name, ratio in passes.items()},
        "speedup_expected_over_real": {
            name: round(median(a / b for a, b in zip(expected[name], real[name], strict=True)), 3) for name in drafters
        },
        "speedup_expected": {name: round(median(expected[name]), 3) for name in drafters},
        "speedup_real": {name: round(median(real[name]), 3) for name in drafters},
        **machine(),
    }


def _own(times: pd.DataFrame, drafter: Any) -> pd.DataFrame:
    """The lines of one drafter."""
    lines = times[times.drafter == drafter.name]
    return lines[lines.layer == drafter.layer] if hasattr(drafter, "layer") else lines
