"""What a trace costs on disk: saving one against writing and flushing as many bytes in one file, and the first read.

The trace of the main job with S, T, C and Z, of 16 requests; interleaved in one process, medians over rounds. The first
read is that of one layer's states by a store that has read nothing yet, the tables read before; files are in the
page cache.
"""

import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

import cacheprobe as cp
from cacheprobe_benchmarks.shared.machine import machine, measuring
from cacheprobe_benchmarks.states.main_job import NEW_TOKENS, SHAPE, coin_prompts

OPENS = 5
SMALL = {"requests": 1, "new_tokens": 2}


def run(rounds: int, *, requests: int = 16, new_tokens: int = NEW_TOKENS) -> dict[str, Any]:
    """raw_over_save: seconds of the raw write over those of the save, 1.0 is as fast; first_read_ms."""
    torch.set_num_threads(1)  # files are written by one
    prompts = coin_prompts(requests)
    model = cp.load_model("smollm2-135m", dtype="bfloat16")
    sampling = cp.SamplingParams(stop_token_ids=(), max_new_tokens=new_tokens)
    trace = cp.run(model, prompts, sampling=sampling, progress=False, **SHAPE)
    saves, raws, reads, opens = [], [], [], []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder, measuring(rounds + 1) as bar:
        for number in range(rounds + 1):
            began = time.perf_counter()
            saved = trace.save(Path(folder) / f"trace-{number}")
            saves.append(time.perf_counter() - began)
            files = [path.read_bytes() for path in sorted(Path(saved).iterdir())]
            raws.append(_written(Path(folder) / f"raw-{number}", files))
            for _ in range(OPENS):
                began = time.perf_counter()
                opened = cp.load_trace(saved)
                opens.append(time.perf_counter() - began)
                began = time.perf_counter()
                opened.store.all_of("S", model.n_layers // 2)
                reads.append(time.perf_counter() - began)
            bar.advance()
    size = sum(map(len, files))
    of_rounds = [raw / save for raw, save in zip(raws[1:], saves[1:], strict=True)]
    return {
        "benchmark": "trace",
        "rounds": rounds,
        "trace_mb": round(size / 10**6),
        "raw_over_save": round(median(of_rounds), 2),
        "of_each_round": [round(one, 2) for one in of_rounds],
        "first_read_ms": round(1000 * median(reads[OPENS:]), 2),
        "open_ms": round(1000 * median(opens[OPENS:]), 1),
        "save_mb_per_second": round(size / 10**6 / median(saves[1:])),
        **machine(),
    }


def _written(path: Path, parts: list[bytes]) -> float:
    """Seconds to write these bytes into one file and flush it to the disk."""
    began = time.perf_counter()
    with open(path, "wb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - began
