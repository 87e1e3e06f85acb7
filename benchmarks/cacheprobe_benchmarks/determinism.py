"""What determinism costs: 64 requests on SmolLM2 in bfloat16, at most 16 in flight, a share of them deterministic.

Two ways to verify are timed. `kept_at_*`: windows of one row, so that a verify pass is a decode of a fixed height in
which the other requests ride along; it costs padding where fewer are in flight. `dvr_kept_at_*`: drafting by the fast
path and verifying windows of 16, as LLM-42 does; it costs the verifier's rows again. Throughput over that of the same
traffic with nothing deterministic. Hugging Face decodes the same requests in static batches of 16, in their order,
each to its longest request's length; only the tokens that were asked for count. All of them advance side by side in one
process, step by step, so that no ratio compares two minutes of the machine.
"""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import torch

import cacheprobe as cp
from cacheprobe.config import EngineConfig
from cacheprobe.progress import Progress
from cacheprobe_benchmarks.hugging_face import HuggingFace
from cacheprobe_benchmarks.machine import machine
from cacheprobe_benchmarks.workload import (
    CAPACITY,
    IN_FLIGHT,
    PROMPT_TOKENS,
    Run,
    Timing,
    marked,
    side_by_side,
    timed,
    traffic,
)

SHARES = (2, 5, 10, 20, 50, 100)
DVR_SHARES = (100,)
PREFILL = dict(prefill_chunk=PROMPT_TOKENS[1], pad_prefill=False)
"""A verified prompt is one pass of its own length."""
FIXED_HEIGHT = EngineConfig(window=1, group=IN_FLIGHT, capacity=CAPACITY, max_batch=IN_FLIGHT, **PREFILL)
DVR = EngineConfig(window=16, group=4, capacity=CAPACITY, max_batch=IN_FLIGHT, **PREFILL)


def run(rounds: int) -> dict[str, Any]:
    """Shares of throughput kept (higher is better) and the base loop's time over Hugging Face's (lower is better)."""
    torch.set_num_threads(2)
    model, hf = cp.load_model("smollm2-135m", dtype="bfloat16"), HuggingFace()
    requests = traffic(model)
    settings: dict[str, tuple[int, EngineConfig]] = {"base": (0, FIXED_HEIGHT)}
    settings |= {f"kept_at_{share}": (share, FIXED_HEIGHT) for share in SHARES}
    settings |= {f"dvr_kept_at_{share}": (share, DVR) for share in DVR_SHARES}
    for config in (FIXED_HEIGHT, DVR):  # shapes are tried, memory is touched
        timed(model, marked(requests[:4], 1.0), config)
    seconds: dict[str, list[float]] = {name: [] for name in ("hf", *settings)}
    last: dict[str, Timing] = {}
    with Progress(100 * rounds, "measuring", "per cent") as bar:
        for number in range(rounds):
            runs = {
                name: Run(model, marked(requests, share / 100), config) for name, (share, config) in settings.items()
            }
            jobs = {"hf": _hugging_face(hf, requests), **{name: run.steps() for name, run in runs.items()}}
            for name, taken in side_by_side(jobs, lambda share, n=number: bar.at(int(100 * (n + share)))).items():
                seconds[name].append(taken)
                bar.say(f"{name}: {taken:.1f} s")
            last = {name: run.timing(seconds[name][-1]) for name, run in runs.items()}
    base = seconds["base"]
    ratios = {"base_over_hf": [one / other for one, other in zip(base, seconds["hf"], strict=True)]}
    for name in list(settings)[1:]:
        ratios[name] = [one / other for one, other in zip(base, seconds[name], strict=True)]
    tokens = sum(map(len, last["base"].tokens))
    return {
        "benchmark": "determinism",
        "rounds": rounds,
        "requests": len(requests),
        "new_tokens": tokens,
        **{name: round(median(of_rounds), 2) for name, of_rounds in ratios.items()},
        "lower_is_better": ["base_over_hf"],
        "of_each_round": {name: [round(one, 2) for one in of_rounds] for name, of_rounds in ratios.items()},
        "base_tokens_per_second": round(tokens / median(base), 1),
        "costs": {name: costs(last[name]) for name in settings if "kept" in name},
        **machine(),
    }


def costs(result: Timing) -> dict[str, float | int]:
    """Where the time went: rollbacks, tokens computed again, rows verified and padded, time that others stood still."""
    verify = [step for step in result.log.steps if step.phase == "verify"]
    verdicts = [verdict for step in verify for verdict in step.verdicts]
    rows = sum(step.batch_shape[0] * step.batch_shape[1] for step in verify)
    real = sum(len(v.target_token_ids) for v in verdicts) + sum(len(step.committed) for step in verify)
    drafted = sum(len(v.draft_token_ids) for v in verdicts)
    committed = sum(v.num_committed for v in verdicts)
    return {
        "rollbacks": sum(v.is_rollback for v in verdicts),
        "recomputed_percent": round(100 * drafted / committed, 1) if committed else 0.0,
        "rows_verified": rows,
        "padding_percent": round(100 * (rows - real) / rows, 1) if rows else 0.0,
        # passes in which no other request moved on
        "stall_seconds": round(sum(step.seconds for step in verify if not step.committed), 1),
    }


def _hugging_face(hf: HuggingFace, requests: Sequence[cp.Request]) -> Iterator[float]:
    for i in range(0, len(requests), IN_FLIGHT):
        batch = requests[i : i + IN_FLIGHT]
        longest = max(request.sampling.max_new_tokens for request in batch)
        hf.generate([list(request.prompt) for request in batch], longest)
        yield min(1.0, (i + IN_FLIGHT) / len(requests))
