"""What a run keeps: bytes and seconds of a token by what `CaptureConfig` says, with drafts that are often rejected.

SmolLM2 in bfloat16 with the settings of a plain `cp.run`, and n-gram drafts, so that rows of every status exist. A
token is one of the prompt or of the generated text. Bytes are those of the saved run: all its files.
"""

import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import torch

import cacheprobe as cp
from cacheprobe_benchmarks.shared.machine import machine, measuring
from cacheprobe_benchmarks.states.main_job import NEW_TOKENS, coin_prompts

SMALL = {"requests": 2, "new_tokens": 4}
KEPT: dict[str, dict[str, Any]] = {
    "nothing": dict(sites=None),
    "S": dict(sites="S"),
    "S, T, C": dict(sites="STC"),
    "S, T, C, Z": dict(sites="STCZ"),
    "S, T, C as int8": dict(sites="STC", dtype="int8"),
    "S, T, C of every 8th position": dict(sites="STC", every=8),
    "S, T, C of rejected drafts": dict(sites="STC", statuses=("rolled_back",)),
    "q, k, v, z of heads": dict(sites=None, heads=("q", "k", "v", "z")),
}


def run(rounds: int, *, requests: int = 8, new_tokens: int = NEW_TOKENS) -> dict[str, Any]:
    """By what is kept: bytes_a_token of the saved run; milliseconds_a_token of the run, without saving, medians over
    rounds; over_nothing: the run's seconds over those of one that keeps nothing."""
    torch.set_num_threads(2)
    model, prompts = cp.load_model("smollm2-135m", dtype="bfloat16"), coin_prompts(requests)
    seconds: dict[str, list[float]] = defaultdict(list)
    sizes: dict[str, float] = {}
    tokens = 0
    with measuring((rounds + 1) * len(KEPT)) as bar:
        for number in range(rounds + 1):
            for name, kept in KEPT.items():
                began = time.perf_counter()
                trace = cp.run(
                    model, prompts, drafter=cp.drafters.NGram(), capture=cp.CaptureConfig(**kept),
                    max_new_tokens=new_tokens, progress=False,
                )  # fmt: skip
                took = time.perf_counter() - began
                if number:  # first calls allocate, and the fixed shapes are tried
                    seconds[name].append(took)
                else:
                    tokens = sum(len(r.prompt_token_ids) + len(trace.committed(r.request_id)) for r in trace.requests)
                    sizes[name] = _saved_bytes(trace) / tokens
                bar.advance(note=f"{name} {took:.1f} s")
    over = {name: [a / b for a, b in zip(took, seconds["nothing"], strict=True)] for name, took in seconds.items()}
    return {
        "benchmark": "kept",
        "rounds": rounds,
        "requests": requests,
        "new_tokens": new_tokens,
        "tokens": tokens,
        "bytes_a_token": {name: round(size) for name, size in sizes.items()},
        "milliseconds_a_token": {name: round(1000 * median(took) / tokens, 3) for name, took in seconds.items()},
        "over_nothing": {name: round(median(ratios), 3) for name, ratios in over.items()},
        "lower_is_better": list(KEPT)[1:],
        "of_each_round": {name: [round(ratio, 3) for ratio in over[name]] for name in list(KEPT)[1:]},
        **machine(),
    }


def _saved_bytes(trace: cp.Trace) -> int:
    """Returns the bytes of all files of the run when it is saved."""
    with tempfile.TemporaryDirectory() as folder:
        return sum(path.stat().st_size for path in trace.save(Path(folder) / "run").iterdir())
