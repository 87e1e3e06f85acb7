"""What speculation gains: SmolLM2 in bfloat16, greedy, committed prompts, capture off, end-of-sequence ignored.

Tokens per second over our own loop without a drafter and over Hugging Face, with tokens per verify pass beside it.
Batch 1 runs one prompt after another; prompt lookup is Hugging Face's own. At batch 8 Hugging Face refuses to draft.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

import cacheprobe as cp
from cacheprobe.config import EngineConfig
from cacheprobe_benchmarks.hugging_face import HuggingFace
from cacheprobe_benchmarks.machine import machine, measuring
from cacheprobe_benchmarks.workload import timed

PROMPTS = Path(__file__).parents[1] / "prompts"
NEW_TOKENS = 48
NUM_ALONE = 4
"""Prompts that run one by one."""
LOOKUP_TOKENS = 8
ALONE = EngineConfig(window=12, group=1, capacity=444, prefill_chunk=148, max_batch=1)
"""Of windows of 6, 8, 12 and 16: 8 and 12 serve the coin equally, 16 repetition best; two chunks hold a coin prompt."""
TOGETHER = EngineConfig(window=12, group=8, capacity=192, prefill_group=8, prefill_chunk=64, max_batch=8)
"""Of windows of 4, 6, 8 and 12 the quickest: from 64 rows on a product is widened."""


def run(rounds: int) -> dict[str, Any]:
    """Ratios of tokens per second, medians over interleaved rounds in one process; higher is better."""
    torch.set_num_threads(2)
    model, hf = cp.load_model("smollm2-135m", dtype="bfloat16"), HuggingFace()
    ids = {name: [list(model.encode(text)) for text in _read(name)] for name in ("repeat", "coin")}
    per_pass: dict[str, float] = {}

    def ours(name: str, prompts: list[list[int]], config: EngineConfig, drafter: Any) -> Callable[[], int]:
        sampling = cp.SamplingParams(max_new_tokens=NEW_TOKENS, stop_token_ids=())

        def job() -> int:
            result = timed(model, [cp.Request(prompt, sampling) for prompt in prompts], config, drafter)
            verdicts = [v for step in result.log.steps for v in step.verdicts]
            if verdicts:
                per_pass[name] = round(sum(v.num_committed for v in verdicts) / len(verdicts), 2)
            return sum(map(len, result.tokens))

        return job

    def theirs(prompts: list[list[int]], batch: int, **settings: Any) -> Callable[[], int]:
        groups = [prompts[i : i + batch] for i in range(0, len(prompts), batch)]
        return lambda: sum(len(out) for g in groups for out in hf.generate(g, NEW_TOKENS, **settings))

    jobs: dict[str, Callable[[], int]] = {}
    for name in ("repeat", "coin"):
        alone = ids[name][:NUM_ALONE]
        jobs[f"{name}_greedy"] = theirs(alone, 1)
        jobs[f"{name}_lookup"] = theirs(alone, 1, prompt_lookup_num_tokens=LOOKUP_TOKENS)
        jobs[f"{name}_undrafted"] = ours("", alone, ALONE, None)
        jobs[f"{name}_drafted"] = ours(name, alone, ALONE, cp.drafters.NGram(length=ALONE.window - 1))
    jobs["batch8_greedy"] = theirs(ids["repeat"], 8)
    jobs["batch8_drafted"] = ours("batch8", ids["repeat"], TOGETHER, cp.drafters.NGram(length=TOGETHER.window - 1))

    speeds = {name: [] for name in jobs}
    with measuring((rounds + 1) * len(jobs)) as bar:
        for number in range(rounds + 1):
            for name, job in jobs.items():
                began = time.perf_counter()
                count = job()
                seconds = time.perf_counter() - began
                if number:  # the first round is not timed: first calls allocate, and the fixed shapes are tried
                    speeds[name].append(count / seconds)
                bar.advance(note=f"{name} {seconds:.1f} s")
    speed = {name: median(values) for name, values in speeds.items()}
    return {
        "benchmark": "speculation",
        "rounds": rounds,
        "new_tokens": NEW_TOKENS,
        "window_alone": ALONE.window,
        "window_together": TOGETHER.window,
        "repeat_over_greedy": round(speed["repeat_drafted"] / speed["repeat_greedy"], 2),
        "repeat_over_undrafted": round(speed["repeat_drafted"] / speed["repeat_undrafted"], 2),
        "coin_over_greedy": round(speed["coin_drafted"] / speed["coin_greedy"], 2),
        "coin_over_best_hf": round(speed["coin_drafted"] / max(speed["coin_greedy"], speed["coin_lookup"]), 2),
        "batch8_over_greedy": round(speed["batch8_drafted"] / speed["batch8_greedy"], 2),
        "tokens_per_verify_pass": per_pass,
        "tokens_per_second": {name: round(value, 1) for name, value in speed.items()},
        **machine(),
    }


def _read(name: str) -> list[str]:
    path = PROMPTS / f"{name}.jsonl"
    if not path.exists():
        raise ValueError(f"{path} is missing; run the benchmark from a checkout")
    return [json.loads(line)["prompt"] for line in path.read_text(encoding="utf-8").splitlines()]
