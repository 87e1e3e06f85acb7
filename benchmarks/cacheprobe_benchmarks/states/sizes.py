"""Whether a model of 1.2 billion weights can be recorded in 12 GB: a random Llama in bfloat16, S, T, C to disk.

32 random prompts of 24 tokens, 64 new tokens each, every step in a process of its own: a run that is measured and
compared with its estimate, a run that is killed when it has written its first part, and one that goes on from there and
is read. 2 threads.
"""

import json
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

import cacheprobe as cp
from cacheprobe_benchmarks.shared.machine import machine, measuring
from cacheprobe_benchmarks.states.memory import resident_mb

SHAPE = dict(
    hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
    head_dim=64, vocab_size=128256, tie_word_embeddings=True, max_position_embeddings=2048,
)  # fmt: skip
PROMPT_TOKENS = 24
SMALL = {"prompts": 2, "new_tokens": 8, "scale": 16, "memory_budget": 8192}


def run(
    rounds: int, *, prompts: int = 32, new_tokens: int = 64, scale: int = 1, memory_budget: "int | str" = "16MiB"
) -> dict[str, Any]:
    """peak_gb: the most memory of a process.  estimated_over_measured: seconds of the run; 1 is exact.  scale: divides
    the model's widths."""
    measured: list[dict[str, float]] = []
    with measuring(1 + rounds * 3) as bar, tempfile.TemporaryDirectory() as folder:
        given = prompts, new_tokens, memory_budget
        weights = _read(_started("save", folder, scale))["billion_weights"]
        bar.advance()
        for number in range(rounds):
            whole = _read(_started("record", folder, f"whole{number}", *given))
            bar.advance()
            _kill_in_part(_started("record", folder, f"killed{number}", *given), Path(folder) / f"killed{number}")
            bar.advance()
            rest = _read(_started("go_on", folder, f"killed{number}", *given))
            bar.advance()
            measured.append({**whole, **rest, "peak_gb": max(whole["peak_gb"], rest["peak_gb"])})
    return {
        "benchmark": "sizes",
        "rounds": rounds,
        "prompts": prompts,
        "new_tokens": new_tokens,
        "billion_weights": round(weights, 2),
        **{name: round(median(one[name] for one in measured), 3) for name in measured[0]},
        "lower_is_better": ["peak_gb"],
        **machine(),
    }


def save(folder: str, scale: int) -> None:
    """Saves the random model."""
    widths = {name: SHAPE[name] // scale for name in ("hidden_size", "intermediate_size", "head_dim", "vocab_size")}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SHAPE, **widths})).to(torch.bfloat16)
    model.save_pretrained(folder)
    _say(billion_weights=sum(one.numel() for one in model.parameters()) / 1e9)


def record(folder: str, out: str, prompts: int, new_tokens: int, memory_budget: "int | str") -> None:
    """Estimates a run and records it."""
    model = _loaded(folder)
    texts = torch.randint(model.d_vocab, (prompts, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0)).tolist()
    sampling = cp.SamplingParams(max_new_tokens=new_tokens, stop_token_ids=())
    settings: dict[str, Any] = {"sampling": sampling, "capture": "STC"}
    began = time.perf_counter()
    estimate = cp.estimate(model, texts, **settings)
    estimated = time.perf_counter()
    cp.run(model, texts, **settings, out=Path(folder) / out, memory_budget=memory_budget, progress=False)
    seconds = time.perf_counter() - estimated
    likely = estimate.seconds.likely if estimate.seconds else 0.0
    _say(estimated_over_measured=likely / seconds, run_seconds=seconds, estimate_seconds=estimated - began)


def go_on(folder: str, out: str, prompts: int, new_tokens: int, memory_budget: "int | str") -> None:
    """Resumes the killed run, and reads all its states."""
    began = time.perf_counter()
    cp.resume(Path(folder) / out, _loaded(folder), progress=False)
    resumed = time.perf_counter()
    trace = cp.load_trace(Path(folder) / out)
    for site, layer, request in product("STC", range(SHAPE["num_hidden_layers"]), range(prompts)):
        assert len(trace.states(site, layer, request)) == PROMPT_TOKENS + new_tokens - 1
    _say(resume_seconds=resumed - began, read_seconds=time.perf_counter() - resumed)


def _loaded(folder: str) -> Any:
    torch.set_num_threads(2)
    return cp.load_model(folder)


def _say(**measured: float) -> None:
    """Prints what was measured, with the peak memory of the process in gigabytes."""
    print(json.dumps({**measured, "peak_gb": resident_mb("VmHWM") / 1000}), flush=True)


def _started(action: str, *given: object) -> "subprocess.Popen[str]":
    code = f"import {__name__} as here; here.{action}(*{given!r})"
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _read(process: "subprocess.Popen[str]") -> dict[str, float]:
    """Returns what a process measured."""
    said, errors = process.communicate()
    if process.returncode:
        raise RuntimeError(f"the measured process failed: {errors.strip()[-300:]}")
    return json.loads(said.splitlines()[-1])


def _kill_in_part(process: "subprocess.Popen[str]", out: Path) -> None:
    """Kills a process when its run has written a part."""
    while process.poll() is None and not list(out.glob("states-*")):
        time.sleep(0.01)
    if process.poll() is not None:
        raise RuntimeError(f"the run ended before it was killed: {process.communicate()[1].strip()[-300:]}")
    process.kill()
    process.communicate()
