"""What the models of packages cost: conversion, load, first run, recording and readings, over transformers' own.

Each figure is for Gemma 3 270M and SmolLM2, and lower is better. Processor seconds of fresh processes: conversion_ratio
is the conversion of the GGUF file over transformers' own load of it, load_ratio a later load over transformers' of the
converted folder. first_run_ratio: the first run of a later process over its third. hooks_ratio and lens_ratio as in
`families`, with coin-flip prompts. reading_ratio: a reading of 480 states over the bare product with the unembedding,
by the fastest way known on this machine.
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import cacheprobe as cp
from cacheprobe.models.known import EMBEDDED, GEMMA, SMOLLM2, embedded_directory, embedded_state
from cacheprobe.models.plain.lm import PlainLM
from cacheprobe.trace.recording.lens_reader import LENS_TILE, LensReader, Queued
from cacheprobe_benchmarks.shared.machine import machine, measuring
from cacheprobe_benchmarks.states import families
from cacheprobe_benchmarks.states.main_job import coin_prompts

SMALL = {"models": (SMOLLM2,), "dtypes": ("bfloat16",), "new_tokens": 2, "converts": False}

_TIMED = """
import json, sys, time
{imports}
began = time.process_time()
{job}
print(json.dumps(time.process_time() - began))
"""
_OURS = "import torch, transformers, cacheprobe as cp", "cp.load_model({name!r}, dtype='float32', progress=False)"
_THEIRS = (
    "import torch; from transformers import AutoModelForCausalLM, AutoTokenizer",
    "AutoModelForCausalLM.from_pretrained({folder!r}, dtype=torch.float32, **{gguf})\n"
    "AutoTokenizer.from_pretrained({folder!r}, **{gguf})",
)
_CONVERSION = (
    "import torch, transformers; from cacheprobe.models.known import embedded_directory",
    "embedded_directory({name!r}, progress=False)",
)
_RUNS = """
import json, sys, time, cacheprobe as cp
model = cp.load_model({name!r}, dtype={dtype!r}, progress=False)
prompts = json.loads(sys.argv[1])
for number in range(3):
    began = time.perf_counter()
    cp.run(model, prompts, max_new_tokens={new_tokens}, sampling=cp.SamplingParams(stop_token_ids=()), progress=False)
    print(json.dumps(time.perf_counter() - began))
"""


def run(
    rounds: int,
    *,
    models: Sequence[str] = (GEMMA, SMOLLM2),
    dtypes: Sequence[str] = families.DTYPES,
    new_tokens: int = families.NEW_TOKENS,
    converts: bool = True,
) -> dict[str, Any]:
    """measured: the ratios, by model and dtype; medians of rounds. left_out: models whose packages are absent.

    converts: whether to measure conversions, in a folder of their own.
    """
    torch.set_num_threads(2)
    here = [name for name in models if embedded_state(name) in ("converted", "installed")]
    measured: dict[str, Any] = {}
    with measuring((rounds + 1) * 4 * len(here) * len(dtypes)) as bar:
        for name in here:
            measured[name] = _first_use(name, rounds, converts)
            for dtype in dtypes:
                measured[f"{name} {dtype}"] = _recording(name, dtype, new_tokens, rounds, bar.advance)
                gc.collect()
    return {
        "benchmark": "own-model",
        "rounds": rounds,
        "prompts": families.PROMPTS,
        "new_tokens": new_tokens,
        "left_out": [name for name in models if name not in here],
        "measured": measured,
        **machine(),
    }


def _first_use(name: str, rounds: int, converts: bool) -> dict[str, float]:
    """Returns load_ratio, the median of alternated processes, and conversion_ratio, of one process each."""
    folder = embedded_directory(name, progress=False)
    ours, theirs = (partial(_seconds, part, name=name, folder=str(folder), gguf={}) for part in (_OURS, _THEIRS))
    found = {"load_ratio": round(median(ours() / theirs() for _ in range(rounds)), 2)}
    if converts:
        with tempfile.TemporaryDirectory() as cache:
            made = _seconds(_CONVERSION, {"CACHEPROBE_CACHE": cache}, name=name)
            file = EMBEDDED[name].gguf(Path(cache))
            own = _seconds(_THEIRS, folder=str(file.parent), gguf={"gguf_file": file.name})
        found["conversion_ratio"] = round(made / own, 2)
    return found


def _seconds(parts: tuple[str, str], environment: Mapping[str, str] = {}, **names: object) -> float:
    """Returns the processor seconds of a job in a process of its own, without its imports. parts: imports and job."""
    imports, job = parts
    return _printed(_TIMED.format(imports=imports, job=job.format(**names)), environment=environment)[0]


def _printed(code: str, *arguments: str, environment: Mapping[str, str] = {}) -> list[float]:
    """Returns the numbers that a Python program prints."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **environment})
    return [float(line) for line in done.stdout.splitlines()]


def _recording(name: str, dtype: str, new_tokens: int, rounds: int, report: Callable[[], None]) -> dict[str, Any]:
    """Returns the ratios of one model and dtype, and the seconds."""
    model = cp.load_model(name, dtype=dtype, progress=False)
    live = AutoModelForCausalLM.from_pretrained(embedded_directory(name), dtype=model.dtype).eval()
    live.generation_config.eos_token_id = None
    texts = [list(model.encode(text)) for text in coin_prompts(families.PROMPTS)]
    prompts = [text[: min(map(len, texts))] for text in texts]
    firsts = []
    for _ in range(rounds):
        first, *_, later = _printed(_RUNS.format(name=name, dtype=dtype, new_tokens=new_tokens), json.dumps(prompts))
        firsts.append(first / later)
    return {
        "first_run_ratio": round(median(firsts), 2),
        "reading_ratio": round(_reading(model, rounds), 2),
        **families.ratios(live, model, prompts, new_tokens, rounds, report),
    }


def _reading(model: PlainLM, rounds: int) -> float:
    """Returns the seconds of reading a tile of states over those of the bare product, medians."""
    states = torch.randn(LENS_TILE, model.d_model, generator=torch.Generator().manual_seed(0)).to(model.dtype)
    targets = torch.arange(LENS_TILE)
    wide, wide_weight = states.float(), model.unembedding.float()
    reader = LensReader(model, cp.lenses.LogitLens(), 5)
    layers = torch.arange(model.n_layers)[torch.arange(LENS_TILE) % model.n_layers]

    def read() -> None:
        """Reads as a run does."""
        reader.queue_resolved(Queued(0, 0, states, layers, int(targets[0])))
        reader.take()

    jobs: dict[str, Callable[[], object]] = {
        "torch": lambda: states @ model.unembedding.T,
        "torch float32": lambda: wide @ wide_weight.T,
        "reading": read,
    }
    if operations := model.operations:
        jobs["loops"] = lambda: operations.product(states, model.unembedding)
    seconds: dict[str, list[float]] = {job: [] for job in jobs}
    with torch.inference_mode():
        for number in range(rounds + 1):
            for job, compute in jobs.items():
                began = time.perf_counter()
                compute()
                if number:
                    seconds[job].append(time.perf_counter() - began)
    medians = {job: median(taken) for job, taken in seconds.items()}
    return medians["reading"] / min(taken for job, taken in medians.items() if job != "reading")
