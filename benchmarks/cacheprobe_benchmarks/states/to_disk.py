"""What recording to disk takes: memory for 4, 16 and 64 times as many requests, time, and write speed.

The job is the main job with S, T and C. Memory is the peak of a process, beyond the model, for 4, 16 and 64 times the
job's requests; 16 run at once, so that the KV cache is the same. The budget is such that the smallest of these runs has
a dozen parts: a shorter run ends before its memory is as full as that of a long one.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

import cacheprobe as cp
from cacheprobe_benchmarks.shared.machine import machine, measuring
from cacheprobe_benchmarks.states.main_job import NEW_TOKENS, SHAPE, coin_prompts
from cacheprobe_benchmarks.states.memory import resident_mb

SMALL = {"requests": 2, "new_tokens": 2}
TIMES = (4, 16, 64)
PAIRS = 5
"""Runs of each kind in a round, one kind after the other; a round's ratio is that of their medians."""


def run(rounds: int, *, requests: int = 16, new_tokens: int = NEW_TOKENS) -> dict[str, Any]:
    """peak_mb: by multiple of the job's requests, beyond the model.  loop_over_memory: seconds until the last token
    of a run that is recorded to disk over those of one in memory.  disk_over_memory: of whole runs, both without
    saving; a run to disk ends when its last bytes are flushed.  saved_over_disk: seconds of a run in memory that is
    saved at its end, over those of one recorded to disk.  write_over_raw: bytes a second of the parts, written and
    flushed, over those of one file of as many bytes."""
    peaks: dict[str, list[int]] = {str(times): [] for times in TIMES}
    with measuring(rounds * (len(TIMES) + 3 * PAIRS)) as bar:
        for times in TIMES * rounds:
            code = f"from {__name__} import child; child({requests * times}, {new_tokens})"
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"the measured process failed: {done.stderr.strip()[-300:]}")
            peaks[str(times)].append(json.loads(done.stdout.splitlines()[-1]))
            bar.advance()
        torch.set_num_threads(2)
        model, prompts = cp.load_model("smollm2-135m", dtype="bfloat16"), coin_prompts(requests)
        settings = {name: value for name, value in _settings(new_tokens).items() if name != "progress"}
        list(cp.stream(model, prompts, **settings))
        seconds: dict[str, list[float]] = {"memory": [], "disk": [], "saved": []}
        loops: dict[str, list[float]] = {name: [] for name in seconds}
        raw: list[float] = []
        for number in range(rounds * PAIRS):
            with tempfile.TemporaryDirectory() as folder:
                for name in seconds if number % 2 else reversed(seconds):
                    began = time.perf_counter()
                    out = {"out": Path(folder) / "disk"} if name == "disk" else {}
                    stream = cp.stream(model, prompts, **settings, **out)
                    *_, at_last = (time.perf_counter() for _ in stream)
                    loops[name].append(at_last - began)
                    if name == "saved":
                        stream.trace().save(Path(folder) / "saved")
                    seconds[name].append(time.perf_counter() - began)
                    bar.advance()
                if number % PAIRS == 0:
                    raw.append(_raw_over_parts(Path(folder) / "disk", Path(folder)))
    ratios = {
        "loop_over_memory": _by_round(loops["disk"], loops["memory"]),
        "disk_over_memory": _by_round(seconds["disk"], seconds["memory"]),
        "saved_over_disk": _by_round(seconds["saved"], seconds["disk"]),
        "write_over_raw": raw,
    }
    return {
        "benchmark": "to-disk",
        "rounds": rounds,
        "new_tokens": new_tokens,
        "peak_mb": (peak := {times: median(values) for times, values in peaks.items()}),
        "most_over_least": round(max(peak.values()) / min(peak.values()), 3),
        **{name: round(median(values), 2) for name, values in ratios.items()},
        "lower_is_better": ["most_over_least", "loop_over_memory", "disk_over_memory"],
        "of_each_round": {name: [round(value, 3) for value in values] for name, values in (ratios | peaks).items()},
        "seconds_median": {name: round(median(values), 2) for name, values in seconds.items()},
        **machine(),
    }


def _by_round(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Returns for each round the ratio of the medians of its runs."""
    starts = range(0, len(ours), PAIRS)
    return [median(ours[at : at + PAIRS]) / median(theirs[at : at + PAIRS]) for at in starts]


def _settings(new_tokens: int) -> dict[str, Any]:
    sampling = cp.SamplingParams(stop_token_ids=(), max_new_tokens=new_tokens)
    return {**SHAPE, "sampling": sampling, "capture": "STC", "progress": False, "max_batch": 16}


def child(requests: int, new_tokens: int) -> None:
    """Prints the peak memory beyond the model, in megabytes."""
    torch.set_num_threads(2)
    model = cp.load_model("smollm2-135m", dtype="bfloat16")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = resident_mb("VmRSS")
    with tempfile.TemporaryDirectory() as folder:
        cp.run(model, coin_prompts(requests), **_settings(new_tokens), out=Path(folder) / "run", memory_budget="48MiB")
    print(json.dumps(round(resident_mb("VmHWM") - before)))


def _raw_over_parts(run: Path, folder: Path) -> float:
    """Returns the seconds of writing one file of as many bytes as the run's states, over those of writing the states as
    the run does: one safetensors file a part, with its checksums."""
    from safetensors.torch import load_file, save_file

    from cacheprobe.trace.storage import RunFiles

    shards = [load_file(path) for path in sorted(run.glob("states-*"))]
    data = b"".join(path.read_bytes() for path in sorted(run.glob("states-*")))
    began = time.perf_counter()
    with (folder / "raw").open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    raw = time.perf_counter() - began
    staging = folder / "staging"
    staging.mkdir()
    files = RunFiles(folder, staging, "again")
    began = time.perf_counter()
    for number, tensors in enumerate(shards):
        files.write(f"states-again-{number}", lambda path, tensors=tensors: save_file(tensors, path))
    parts = time.perf_counter() - began
    shutil.rmtree(staging)
    return raw / parts
