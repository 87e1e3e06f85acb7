"""What recording takes in memory beyond the model: peak resident memory of the main job, in a process of its own.

Counted from what the process held when the model was loaded. A first run of one token is counted too: it loads what
tables and figures need.
"""

import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch

import cacheprobe as cp
from cacheprobe_benchmarks.shared.machine import machine, measuring
from cacheprobe_benchmarks.states.main_job import NEW_TOKENS, SHAPE, coin_prompts

MEGABYTE = 10**6
SMALL = {"requests": 1, "new_tokens": 2}


def run(rounds: int, *, requests: int = 16, new_tokens: int = NEW_TOKENS) -> dict[str, Any]:
    """beyond_model_mb: peak less model; trace_mb: states in the trace; beyond_trace_mb: the difference of the two."""
    taken: list[dict[str, float]] = []
    command = [sys.executable, "-c", f"from {__name__} import child; child({requests}, {new_tokens})"]
    with measuring(rounds) as bar:
        for _ in range(rounds):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"the measured process failed: {done.stderr.strip()[-300:]}")
            taken.append(json.loads(done.stdout.splitlines()[-1]))
            bar.advance()
    torch.set_num_threads(1)
    return {
        "benchmark": "memory",
        "rounds": rounds,
        "new_tokens": new_tokens,
        **{name: round(median(one[name] for one in taken)) for name in taken[0]},
        **machine(),
    }


def child(requests: int, new_tokens: int) -> None:
    """Print, as JSON, what the main job with S, T, C and Z took; everything in megabytes."""
    torch.set_num_threads(1)  # a second one takes no memory to speak of
    prompts = coin_prompts(requests)
    model = cp.load_model("smollm2-135m", dtype="bfloat16")
    with open("/proc/self/clear_refs", "w") as file:  # the peak is counted from here: loading a model has its own
        file.write("5")
    model_mb = resident_mb("VmRSS")
    sampling = cp.SamplingParams(stop_token_ids=(), max_new_tokens=new_tokens)
    trace = cp.run(model, prompts, sampling=sampling, progress=False, **SHAPE)
    held = [trace.store.all_of(site, layer) for site in trace.store.sites for layer in trace.store.layers]
    trace_mb = sum(tensor.numel() * tensor.element_size() for tensor in held) / MEGABYTE
    beyond = resident_mb("VmHWM") - model_mb
    figures = {"model_mb": model_mb, "beyond_model_mb": beyond, "trace_mb": trace_mb}
    print(json.dumps({**figures, "beyond_trace_mb": beyond - trace_mb}))


def resident_mb(field: str) -> float:
    """Returns a field of /proc/self/status, such as VmHWM (the peak), in megabytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024 / MEGABYTE
