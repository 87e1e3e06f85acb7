"""What recording costs: 16 coin-flip prompts x 32 new tokens on SmolLM2, greedy, bfloat16, 2 threads.

Measured against Hugging Face `generate` of the same batch with nothing captured, on a separately loaded copy with its
default attention; interleaved in one process, ratios of medians. No drafter, nothing deterministic, EOS ignored.
"""

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

import cacheprobe as cp
from cacheprobe.models.smollm2 import smollm2_directory
from cacheprobe_benchmarks.machine import machine, measuring

NEW_TOKENS = 32
PROMPTS = Path(__file__).parents[2] / "data" / "coin_flip_bench.jsonl"


def run(rounds: int) -> dict[str, Any]:
    """Seconds and ratios of the main job with and without Z; lower is better, 1.0 is Hugging Face with nothing kept."""
    if not PROMPTS.exists():
        raise ValueError(f"{PROMPTS} is missing; run the benchmark from a checkout")
    torch.set_num_threads(2)
    prompts = [example.prompt for example in cp.tasks.load_examples(PROMPTS)]
    model = cp.load_model("smollm2-135m", dtype="bfloat16")
    sampling = cp.SamplingParams(stop_token_ids=(), max_new_tokens=NEW_TOKENS)

    def ours(capture: str) -> Callable[[], list[list[int]]]:
        def job() -> list[list[int]]:
            trace = cp.run(model, prompts, capture=capture, sampling=sampling, progress=False)
            return [trace.committed(i) for i in range(len(prompts))]

        return job

    jobs = {"hf": _hugging_face(prompts), "stc": ours("STC"), "stcz": ours("STCZ")}
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    with measuring((rounds + 1) * len(jobs)) as bar:
        for number in range(rounds + 1):
            for name, job in jobs.items():
                began = time.perf_counter()
                tokens = job()
                if number:  # the first round is not timed: first calls allocate
                    seconds[name].append(time.perf_counter() - began)
                if any(len(ids) != NEW_TOKENS for ids in tokens):
                    raise RuntimeError(
                        f"{name} generated {[len(ids) for ids in tokens]} tokens instead of {NEW_TOKENS} each"
                    )
                bar.advance(note=name)
    medians = {name: median(values) for name, values in seconds.items()}
    return {
        "benchmark": "main-job",
        "prompts": len(prompts),
        "new_tokens": NEW_TOKENS,
        "rounds": rounds,
        "stc_ratio": round(medians["stc"] / medians["hf"], 2),
        "stcz_ratio": round(medians["stcz"] / medians["hf"], 2),
        "seconds_median": {name: round(value, 2) for name, value in medians.items()},
        **machine(),
    }


def _hugging_face(prompts: list[str]) -> Callable[[], list[list[int]]]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = smollm2_directory()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
    batch = tokenizer(prompts, return_tensors="pt", padding=True)

    def job() -> list[list[int]]:
        with torch.inference_mode():
            out = model.generate(
                **batch, do_sample=False, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, pad_token_id=0
            )
        return out[:, batch["input_ids"].shape[1] :].tolist()

    return job
