"""What a tuned lens gains over the logit lens: SmolLM2 in float32, a training of minutes, KL by layer on held-out text.

A round is one training with a seed of its own; with more than one, the median of each layer's divergence is given.
"""

from statistics import median
from typing import Any

import torch

import cacheprobe as cp
from cacheprobe.training.settings import TunedLensSettings
from cacheprobe.training.tuned_lens import train_tuned_lens
from cacheprobe_benchmarks.shared.machine import machine, say

STEPS, TEXTS, LENGTH, HELD_OUT = 24, 2, 64, 6
"""Texts of the published recipe are 2048 tokens, and 128 of them make a step: this is what minutes allow."""

SMALL = {"steps": 2, "texts": 1, "length": 16, "held_out": 1}


def run(
    rounds: int, *, steps: int = STEPS, texts: int = TEXTS, length: int = LENGTH, held_out: int = HELD_OUT
) -> dict[str, Any]:
    """Mean KL divergence to the model's own output, by layer, under each lens; lower is better."""
    torch.set_num_threads(2)
    model = cp.load_model("smollm2-135m", dtype="float32")
    told = []
    for seed in range(rounds):
        settings = TunedLensSettings(steps=steps, texts=texts, length=length, held_out=held_out, seed=seed)
        about = train_tuned_lens(model, settings).about
        say(f"training {seed}", about["seconds"])
        told.append(about)
    curves = {
        name: [round(median(layer), 4) for layer in zip(*(about[name] for about in told), strict=True)]
        for name in ("kl_nats_logit", "kl_nats_tuned")
    }
    lower = sum(tuned < logit for logit, tuned in zip(*curves.values(), strict=True))
    return {
        "benchmark": "tuned-lens",
        "rounds": rounds,
        "settings": told[0]["settings"],
        "tokens": told[0]["tokens"],
        "held_out_tokens": told[0]["held_out_tokens"],
        **curves,
        "layers_lower": lower,
        "layers": len(curves["kl_nats_logit"]),
        "mean_ratio": round(sum(curves["kl_nats_tuned"]) / sum(curves["kl_nats_logit"]), 3),
        "seconds": median(about["seconds"] for about in told),
        "weights": model.weights_note,
        **machine(),
    }
