"""What a drafter costs at the defaults: time of `cp.run` with each drafter over that without one, greedy.

SmolLM2 and Gemma 3 270M in bfloat16 and float32, coin-flip prompts, end-of-sequence ignored, with and without capture.
A model that is not on this machine is left out, with the reason. The draft model is the first third of the model's own
layers.
"""

import copy
from statistics import median
from time import perf_counter
from typing import Any

import torch

import cacheprobe as cp
from cacheprobe.models.base import CachedLM
from cacheprobe.models.settings import live_model
from cacheprobe_benchmarks.shared.machine import machine, measuring
from cacheprobe_benchmarks.shared.workload import stored_prompts

MODELS = ("smollm2-135m", "gemma-3-270m")
NUM_PROMPTS, NEW_TOKENS = 8, 24
CAPTURES = {"nothing": None, "stcz": "STCZ"}
SMALL = {
    "models": MODELS[:1],
    "dtypes": ("bfloat16",),
    "num_prompts": 2,
    "new_tokens": 4,
    "captures": {"nothing": None},
}


def run(
    rounds: int,
    *,
    models: tuple[str, ...] = MODELS,
    dtypes: tuple[str, ...] = ("bfloat16", "float32"),
    num_prompts: int = NUM_PROMPTS,
    new_tokens: int = NEW_TOKENS,
    captures: "dict[str, str | None]" = CAPTURES,
) -> dict[str, Any]:
    """By model, dtype, capture and drafter: seconds over those without a drafter, the median over alternated rounds."""
    torch.set_num_threads(2)
    prompts = stored_prompts("coin")[:num_prompts]
    settings = {"sampling": cp.SamplingParams(max_new_tokens=new_tokens, stop_token_ids=()), "progress": False}
    ratios: dict[str, list[float]] = {}
    drafts: dict[str, str] = {}
    left_out: dict[str, str] = {}
    with measuring((rounds + 1) * len(models) * len(dtypes) * len(captures)) as bar:
        for name in models:
            for dtype in dtypes:
                try:
                    model = cp.load_model(name, dtype=dtype)
                except (ValueError, OSError) as error:
                    left_out[name] = f"{error!s:.200}"
                    continue
                drafters = drafters_of(model)
                for captured, capture in captures.items():
                    for number in range(rounds + 1):  # first calls allocate, try shapes and measure costs
                        seconds = {}
                        for kind, drafter in drafters.items():
                            began = perf_counter()
                            trace = cp.run(model, prompts, drafter=drafter, capture=capture, **settings)
                            seconds[kind] = perf_counter() - began
                            drafts[f"{name} {dtype} {captured} {kind}"] = trace.draft_line
                        for kind, spent in seconds.items():
                            key = f"{name} {dtype} {captured} {kind}"
                            ratios.setdefault(key, []).extend([spent / seconds["none"]] * (number > 0))
                        bar.advance()
    own = {key: of for key, of in ratios.items() if not key.endswith("none")}
    return {
        "benchmark": "drafts",
        "rounds": rounds,
        "num_prompts": num_prompts,
        "new_tokens": new_tokens,
        "over_undrafted": {key: round(median(of), 3) for key, of in own.items()},
        "of_each_round": {key: [round(one, 3) for one in of] for key, of in own.items()},
        "drafts": {key: drafts[key] for key in own},
        "left_out": left_out,
        **machine(),
    }


def drafters_of(model: CachedLM) -> dict[str, Any]:
    """No drafter, n-grams, an exit after two thirds of the layers, and a draft model."""
    return {
        "none": None,
        "ngram": cp.drafters.NGram(),
        "early_exit": cp.drafters.EarlyExit(layer=2 * model.n_layers // 3),
        "draft_model": cp.drafters.DraftModel(first_layers(model, model.n_layers // 3)),
    }


def first_layers(model: CachedLM, count: int) -> CachedLM:
    """A model of the first layers of a model, with its embedding and its unembedding."""
    live: Any = copy.deepcopy(live_model(model))
    live.model.layers = live.model.layers[:count]
    live.config.num_hidden_layers = count
    if getattr(live.config, "layer_types", None):
        live.config.layer_types = live.config.layer_types[:count]
    return cp.load_model(live, tokenizer=model.tokenizer)
