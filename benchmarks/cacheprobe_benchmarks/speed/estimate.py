"""How near `cp.estimate` comes: estimated over measured seconds and bytes of jobs of SmolLM2, 2 threads.

16 coin-flip prompts x 32 tokens, end-of-sequence ignored: float32 and bfloat16; with and without Z; half of the
requests deterministic; drafted by FastPath and EarlyExit. A round estimates a job and runs it straight after, so that
other load slows both.
"""

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch

import cacheprobe as cp
from cacheprobe.trace.trace import Trace
from cacheprobe_benchmarks.shared.machine import machine, measuring
from cacheprobe_benchmarks.states.main_job import coin_prompts

DTYPES = ("bfloat16", "float32")
JOBS: dict[str, dict[str, Any]] = {
    "nothing": dict(capture=None),
    "stc": dict(capture="STC"),
    "stcz": dict(capture="STCZ"),
    "stcz half deterministic": dict(capture="STCZ", deterministic=0.5),
    "stc drafted by fast_path": dict(capture="STC", drafter=cp.drafters.FastPath()),
    "stc drafted by early_exit": dict(capture="STC", drafter=cp.drafters.EarlyExit(layer=26)),
}
SMALL = {
    "requests": 2,
    "new_tokens": 3,
    "dtypes": ("float32",),
    "jobs": {"stcz": JOBS["stcz"], "drafted": dict(capture="STC", drafter=cp.drafters.EarlyExit(layer=0), window=4)},
}


def run(
    rounds: int,
    *,
    requests: int = 16,
    new_tokens: int = 32,
    dtypes: tuple[str, ...] = DTYPES,
    jobs: Mapping[str, Mapping[str, Any]] = JOBS,
) -> dict[str, Any]:
    """estimated_over_measured: seconds, of runs long enough to be timed, and bytes of states and files; 1 is exact.
    estimate_over_run: seconds
    of the estimate itself over those of the run."""
    torch.set_num_threads(2)
    ratios: dict[str, dict[str, list[float]]] = {}
    with measuring(rounds * len(dtypes) * len(jobs)) as bar:
        for dtype in dtypes:
            model = cp.load_model("smollm2-135m", dtype=dtype)
            prompts = coin_prompts(requests)
            for name, job in jobs.items():
                settings = {**job, "sampling": cp.SamplingParams(stop_token_ids=(), max_new_tokens=new_tokens)}
                cp.run(model, prompts[:1], progress=False, **settings)  # tries the pass shapes, and allocates
                for _ in range(rounds):
                    for what, ratio in _compare(model, prompts, settings).items():
                        ratios.setdefault(f"{dtype} {name}", {}).setdefault(what, []).append(ratio)
                    bar.advance(note=f"{dtype} {name}")
    medians = {job: {what: round(median(r), 3) for what, r in of_job.items()} for job, of_job in ratios.items()}
    overhead = {job: of_job.pop("estimate_over_run") for job, of_job in medians.items()}
    return {
        "benchmark": "estimate",
        "rounds": rounds,
        "requests": requests,
        "new_tokens": new_tokens,
        "estimated_over_measured": medians,
        "estimate_over_run": overhead,
        **machine(),
    }


def _compare(model: Any, prompts: list[str], settings: Mapping[str, Any]) -> dict[str, float]:
    """Returns the ratios of one estimate to the run that follows."""
    began = time.perf_counter()
    estimate = cp.estimate(model, prompts, **settings)
    estimated = time.perf_counter()
    trace = cp.run(model, prompts, progress=False, **settings)
    seconds = time.perf_counter() - estimated
    states, disk = _sizes(trace)
    sizes = {"states": (estimate.state_bytes.likely, states)} if states else {}
    sizes |= {"disk": (estimate.disk_bytes.likely, disk)}
    if estimate.seconds is not None:
        sizes["seconds"] = estimate.seconds.likely, seconds
    return {
        **{name: one / other for name, (one, other) in sizes.items()},
        "estimate_over_run": (estimated - began) / seconds,
    }


def _sizes(trace: Trace) -> tuple[int, int]:
    """Returns the bytes of a trace's tensors, and of its files."""
    held = [trace.store.all_of(site, layer) for site in trace.store.sites for layer in trace.store.layers]
    with tempfile.TemporaryDirectory() as folder:
        files = sum(path.stat().st_size for path in trace.save(Path(folder) / "run").iterdir())
    return sum(tensor.numel() * tensor.element_size() for tensor in held), files
