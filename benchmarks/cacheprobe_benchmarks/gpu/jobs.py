"""Times the main job on a GPU: 16 prompts x 32 tokens of SmolLM2 and of random models of 1 and 8 billion weights.

Against Hugging Face's `generate` of the same batch with nothing recorded, on a copy that shares the weights, in
alternating rounds; and against the roofline: the job's multiplications and bytes at the device's best measured rates.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import cacheprobe as cp
from cacheprobe.core.live import LiveModule
from cacheprobe.models.base import CachedLM
from cacheprobe.models.hf.shared import sharing_copy
from cacheprobe.models.known import smollm2_directory
from cacheprobe.models.loaders import plain_model
from cacheprobe_benchmarks.shared.hugging_face import generated
from cacheprobe_benchmarks.speed.products import Rates
from cacheprobe_benchmarks.speed.roofline import Roofline
from cacheprobe_benchmarks.states.main_job import JOBS, NEW_TOKENS, SHAPE, coin_prompts, least_seconds, recorded


class Shape(NamedTuple):
    """Holds the dimensions of a random llama-like model."""

    vocab: int
    hidden: int
    mlp: int
    layers: int
    heads: int
    groups: int


SHAPES = {
    "random-1b": Shape(128_256, 2048, 8192, 16, 32, 8),
    "random-8b": Shape(128_256, 4096, 14_336, 32, 32, 8),
}
"""Dimensions of Llama 3.2 1B and Llama 3.1 8B, without their weights."""
SMALL = Shape(64, 32, 48, 2, 4, 2)
"""For a dry run."""


def random_llama(shape: Shape, device: str, dtype: torch.dtype = torch.bfloat16) -> LiveModule:
    """Returns a llama with random weights, made on the device in its dtype."""
    config = LlamaConfig(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.mlp, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.groups, eos_token_id=None, bos_token_id=None,
        pad_token_id=None, dtype=dtype,
    )  # fmt: skip
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def named(name: str, device: str, is_small: bool = False) -> tuple[CachedLM, list[list[int]]]:
    """Returns a model by the name of its job, and the prompts of the job.

    is_small: two prompts, and a tiny random model.
    The fingerprint of a random model names its seed and shape in place of a SHA-256 of its weights, for which the
    largest would download 16 GB.
    Raises: FileNotFoundError if the package with SmolLM2 is absent.
    """
    if name not in SHAPES:
        smollm2_directory()
        live, tokenizer, _ = plain_model(name, "bfloat16")
        prompts = [tokenizer(prompt).input_ids for prompt in coin_prompts(2 if is_small else 16)]
        return cp.load_model(live.to(device)), prompts
    shape = SMALL if is_small else SHAPES[name]
    draw = torch.Generator().manual_seed(0)
    lengths = (3, 2) if is_small else (32,) * 16
    prompts = [torch.randint(0, shape.vocab, (length,), generator=draw).tolist() for length in lengths]
    model = cp.load_model(random_llama(shape, device))
    model._hashed = model.weights_checksum, f"seed 0, {shape}"
    return model, prompts


def main_job(
    model: CachedLM, prompts: Sequence[list[int]], rates: Rates, rounds: int, new_tokens: int = NEW_TOKENS
) -> dict[str, Any]:
    """Returns ratios of seconds, medians over alternating rounds: each job to Hugging Face with nothing recorded, and
    to the roofline. The first round is not timed."""
    theirs = sharing_copy(model.live)
    theirs.generation_config.eos_token_id = None
    seconds: dict[str, list[float]] = defaultdict(list)
    for number in range(rounds + 1):
        jobs: dict[str, Callable[[], object]] = {"hf": lambda: generated(theirs, prompts, new_tokens)}
        jobs |= {n: lambda s=s: recorded(model, prompts, new_tokens, **SHAPE, **s) for n, s in JOBS.items()}
        for name, job in jobs.items():
            began = time.perf_counter()
            job()  # ends with the tokens on the CPU
            if number:
                seconds[name].append(time.perf_counter() - began)
    of_each = {name: [a / b for a, b in zip(seconds[name], seconds["hf"], strict=True)] for name in JOBS}
    least = least_seconds(Roofline.of(model, rates), model.n_layers, prompts, new_tokens)
    return {
        "products": model.operations.text if model.operations else "torch",
        **{f"{name}_ratio": round(median(ratios), 2) for name, ratios in of_each.items()},
        **{f"{name}_over_roofline": round(median(seconds[name]) / took, 2) for name, took in least.items()},
        "of_each_round": {f"{name}_ratio": [round(one, 2) for one in ratios] for name, ratios in of_each.items()},
        "seconds_median": {name: round(median(taken), 3) for name, taken in seconds.items()},
    }
