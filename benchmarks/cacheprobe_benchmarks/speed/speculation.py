"""What speculation gains: SmolLM2 in bfloat16, greedy, committed prompts, capture off, end-of-sequence ignored.

Tokens per second over our own loop without a drafter and over Hugging Face, with tokens per verify pass beside it.
Batch 1 runs one prompt after another; prompt lookup is Hugging Face's own. At batch 8 Hugging Face refuses to draft.
Where a processor's bfloat16 is no quicker than float32, ours run once more with `products="compiled"`, under their
names with _compiled.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import product
from statistics import mean, median
from typing import Any

import torch

import cacheprobe as cp
from cacheprobe.core.config import EngineConfig
from cacheprobe.ops.wide_product import wide_rows
from cacheprobe_benchmarks.shared.hugging_face import HuggingFace
from cacheprobe_benchmarks.shared.machine import machine, measuring
from cacheprobe_benchmarks.shared.workload import side_by_side, stored_prompts, timed

NEW_TOKENS = 48
NUM_ALONE = 4
"""Prompts that run one by one."""
LOOKUP_TOKENS = 8
COMPILED = "_compiled"
SMALL = {"new_tokens": 2, "alone": 1, "together": 2}
ALONE = EngineConfig(window=10, group=1, capacity=360, prefill_chunk=320, pad_prefill=False, max_batch=1)
"""Windows of 8 to 11 take the coin alike, others longer; repetition gains from long ones. One chunk, as long as the
prompt, holds a coin prompt, and the capacity holds the longest with its answer: attention runs over all of it."""
TOGETHER = EngineConfig(window=12, group=8, capacity=192, prefill_group=8, prefill_chunk=64, max_batch=8)
"""Of windows of 4, 6, 8 and 12 the quickest, where 16-bit arithmetic is emulated."""


def run(
    rounds: int, *, new_tokens: int = NEW_TOKENS, alone: int = NUM_ALONE, together: int | None = None
) -> dict[str, Any]:
    """Ratios of tokens per second of jobs that run side by side, prompt by prompt; medians over rounds; higher is
    better.

    alone, together: number of prompts that run one by one, and at batch 8; None for all prompts.
    """
    torch.set_num_threads(2)
    models, hf = {"": cp.load_model("smollm2-135m", dtype="bfloat16")}, HuggingFace()
    model = models[""]
    if wide_rows(model.dtype, model.device):
        models[COMPILED] = cp.load_model("smollm2-135m", dtype="bfloat16", products="compiled")
    ids = {name: [list(model.encode(text)) for text in stored_prompts(name)] for name in ("repeat", "coin")}
    batched = ids["repeat"][:together]
    sampling = cp.SamplingParams(max_new_tokens=new_tokens, stop_token_ids=())

    def ours(name: str, end: str, prompts: list[list[int]], config: EngineConfig, drafter: Any) -> Iterator[float]:
        groups = _groups(prompts, config.max_batch)
        for number, group in enumerate(groups, 1):
            result = timed(models[end], [cp.Request(prompt, sampling) for prompt in group], config, drafter)
            verdicts[name + end] += [v.num_committed for step in result.log.steps for v in step.verdicts]
            yield number / len(groups)

    def theirs(prompts: list[list[int]], batch: int, **settings: Any) -> Iterator[float]:
        return hf.in_turn([(group, new_tokens) for group in _groups(prompts, batch)], **settings)

    def jobs() -> dict[str, Iterator[float]]:
        made: dict[str, Iterator[float]] = {}
        for name in ("repeat", "coin"):
            singles = ids[name][:alone]
            made[f"{name}_greedy"] = theirs(singles, 1)
            made[f"{name}_lookup"] = theirs(singles, 1, prompt_lookup_num_tokens=LOOKUP_TOKENS)
            for end in models:
                drafter = cp.drafters.NGram(length=ALONE.window - 1)
                made[f"{name}_undrafted{end}"] = ours("none", end, singles, ALONE, None)
                made[f"{name}_drafted{end}"] = ours(name, end, singles, ALONE, drafter)
        made["batch8_greedy"] = theirs(batched, 8)
        for end in models:
            drafter = cp.drafters.NGram(length=TOGETHER.window - 1)
            made[f"batch8_drafted{end}"] = ours("batch8", end, batched, TOGETHER, drafter)
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
        "window_together": TOGETHER.window,
        **{name: round(median(of_rounds), 2) for name, of_rounds in _ratios(speeds, models).items()},
        "of_each_round": {
            name: [round(one, 2) for one in of_rounds] for name, of_rounds in _ratios(speeds, models).items()
        },
        "tokens_per_verify_pass": {name: round(mean(many), 2) for name, many in verdicts.items() if "none" not in name},
        "tokens_per_second": {name: round(median(one[name] for one in speeds), 1) for name in counts},
        **machine(),
    }


def _ratios(speeds: list[dict[str, float]], ends: Iterable[str]) -> dict[str, list[float]]:
    """By round: both sides of a ratio ran side by side, rounds did not."""
    of: dict[str, list[float]] = defaultdict(list)
    for speed, end in product(speeds, ends):
        for name in ("repeat", "coin", "batch8"):
            of[f"{name}_over_greedy{end}"].append(speed[f"{name}_drafted{end}"] / speed[f"{name}_greedy"])
        of[f"repeat_over_undrafted{end}"].append(speed[f"repeat_drafted{end}"] / speed[f"repeat_undrafted{end}"])
        best = max(speed["coin_greedy"], speed["coin_lookup"])
        of[f"coin_over_best_hf{end}"].append(speed[f"coin_drafted{end}"] / best)
    return dict(of)


def _groups(prompts: list[list[int]], size: int) -> list[list[list[int]]]:
    return [prompts[i : i + size] for i in range(0, len(prompts), size)]
