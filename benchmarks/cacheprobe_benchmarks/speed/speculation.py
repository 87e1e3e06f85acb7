"""What speculation gains: SmolLM2 in bfloat16, greedy, committed prompts, capture off, end-of-sequence ignored.

Tokens per second over our own loop without a drafter and over Hugging Face, with tokens per verify pass beside it.
Batch 1 runs one prompt after another; prompt lookup is Hugging Face's own. At batch 8 Hugging Face refuses to draft.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from statistics import mean, median
from typing import Any

import torch

import cacheprobe as cp
from cacheprobe.core.config import EngineConfig
from cacheprobe_benchmarks.shared.hugging_face import HuggingFace
from cacheprobe_benchmarks.shared.machine import machine, measuring
from cacheprobe_benchmarks.shared.workload import side_by_side, stored_prompts, timed

NEW_TOKENS = 48
NUM_ALONE = 4
"""Prompts that run one by one."""
LOOKUP_TOKENS = 8
SMALL = {"new_tokens": 2, "alone": 1, "together": 2}
ALONE = EngineConfig(window=16, group=1, capacity=368, prefill_chunk=320, pad_prefill=False, max_batch=1)
"""One chunk, as long as the prompt, holds a coin prompt, and the capacity holds the longest with its answer."""
TOGETHER = {"window": 16, "group": 8, "capacity": 192, "max_batch": 8}
"""The rest is chosen as `cp.run` does."""


def run(
    rounds: int, *, new_tokens: int = NEW_TOKENS, alone: int = NUM_ALONE, together: int | None = None
) -> dict[str, Any]:
    """Ratios of tokens per second of jobs that run side by side, prompt by prompt; medians over rounds; higher is
    better.

    alone, together: number of prompts that run one by one, and at batch 8; None for all prompts.
    """
    torch.set_num_threads(2)
    model, hf = cp.load_model("smollm2-135m", dtype="bfloat16"), HuggingFace()
    ids = {name: [list(model.encode(text)) for text in stored_prompts(name)] for name in ("repeat", "coin")}
    batched = ids["repeat"][:together]
    sampling = cp.SamplingParams(max_new_tokens=new_tokens, stop_token_ids=())

    def ours(
        name: str, prompts: list[list[int]], config: "EngineConfig | Mapping[str, int]", drafter: Any
    ) -> Iterator[float]:
        groups = _groups(prompts, 1 if config is ALONE else TOGETHER["max_batch"])
        for number, group in enumerate(groups, 1):
            result = timed(model, [cp.Request(prompt, sampling) for prompt in group], config, drafter)
            verdicts[name] += [v.num_committed for step in result.log.steps for v in step.verdicts]
            yield number / len(groups)

    def theirs(prompts: list[list[int]], batch: int, **settings: Any) -> Iterator[float]:
        return hf.in_turn([(group, new_tokens) for group in _groups(prompts, batch)], **settings)

    def jobs() -> dict[str, Iterator[float]]:
        made: dict[str, Iterator[float]] = {}
        for name in ("repeat", "coin"):
            singles = ids[name][:alone]
            made[f"{name}_greedy"] = theirs(singles, 1)
            made[f"{name}_lookup"] = theirs(singles, 1, prompt_lookup_num_tokens=LOOKUP_TOKENS)
            made[f"{name}_undrafted"] = ours("none", singles, ALONE, None)
            made[f"{name}_drafted"] = ours(name, singles, ALONE, cp.drafters.NGram(length=ALONE.window - 1))
        made["batch8_greedy"] = theirs(batched, 8)
        made["batch8_undrafted"] = ours("none", batched, TOGETHER, None)
        drafter = cp.drafters.NGram(length=TOGETHER["window"] - 1)
        made["batch8_drafted"] = ours("batch8", batched, TOGETHER, drafter)
        return made

    taken: list[dict[str, float]] = []
    with measuring(rounds + 1) as bar:
        for _ in range(rounds + 1):
            verdicts: dict[str, list[int]] = defaultdict(list)
            taken.append(side_by_side(jobs()))
            bar.advance(note=f"{sum(taken[-1].values()):.0f} s")
    del taken[0]  # first calls allocate, and the fixed shapes are tried
    counts = {name: new_tokens * (len(batched) if "batch8" in name else alone) for name in taken[0]}
    speeds = [{name: counts[name] / seconds for name, seconds in one.items()} for one in taken]
    return {
        "benchmark": "speculation",
        "rounds": rounds,
        "new_tokens": new_tokens,
        "window_alone": ALONE.window,
        "window_together": TOGETHER["window"],
        **{name: round(median(of_rounds), 2) for name, of_rounds in _ratios(speeds).items()},
        "of_each_round": {name: [round(one, 2) for one in of_rounds] for name, of_rounds in _ratios(speeds).items()},
        "tokens_per_verify_pass": {name: round(mean(many), 2) for name, many in verdicts.items() if many},
        "tokens_per_second": {name: round(median(one[name] for one in speeds), 1) for name in counts},
        **machine(),
    }


def _ratios(speeds: list[dict[str, float]]) -> dict[str, list[float]]:
    """By round: both sides of a ratio ran side by side, rounds did not."""
    of: dict[str, list[float]] = defaultdict(list)
    for speed in speeds:
        for name in ("repeat", "coin", "batch8"):
            of[f"{name}_over_greedy"].append(speed[f"{name}_drafted"] / speed[f"{name}_greedy"])
            of[f"{name}_over_undrafted"].append(speed[f"{name}_drafted"] / speed[f"{name}_undrafted"])
        for name in ("coin", "repeat"):
            best = max(speed[f"{name}_greedy"], speed[f"{name}_lookup"])
            of[f"{name}_over_best_hf"].append(speed[f"{name}_drafted"] / best)
    return dict(of)


def _groups(prompts: list[list[int]], size: int) -> list[list[list[int]]]:
    return [prompts[i : i + size] for i in range(0, len(prompts), size)]
