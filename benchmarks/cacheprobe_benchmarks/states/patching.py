"""What sharing saves: a patching grid of the residual stream against TransformerLens' own sweep of the same grid.

SmolLM2 in float32, all layers x all positions of a pair of 23 tokens, in one process with the same threads. Theirs is
`transformer_lens.patching.get_act_patch_resid_pre` on the bridge whose weights our plain model shares. Two
pairs: a coin that lies heads and one that lies tails, where what stands before that word is the same in both runs and
costs us nothing; and the same with another first token too, so that every cell has to be computed. The first pair is
swept in float64 as well, by both, to tell whose roundings the difference is.
"""

import time
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

import cacheprobe as cp
from cacheprobe.models.plain.lm import PlainLM
from cacheprobe.tasks.coin_flip import ANSWERS, coin_question
from cacheprobe_benchmarks.shared.machine import machine, measuring, say
from cacheprobe_benchmarks.states.patching_precision import SWEEPS, apart, farthest_apart, our_sweep, precision, sanity

PEOPLE = (("Tim", True), ("Arthur", True))
TOKENS = 23
SMALL = {"tokens": 8}


class Compared(NamedTuple):
    """Both sweeps of one pair."""

    told: dict[str, Any]
    found: dict[str, Tensor]
    """[l, t] logit differences, by whose they are."""


def run(rounds: int, *, tokens: int = TOKENS) -> dict[str, Any]:
    """Ratios of seconds, theirs over ours, medians over interleaved rounds; higher is better. Pair two runs once.

    tokens: of the pair, from its start; the coin's side is token 5.
    """
    torch.set_num_threads(2)
    model = cp.load_model("smollm2-135m", dtype="float32")
    clean, corrupt = (list(model.encode(coin_question(side, PEOPLE).text)) for side in ("heads", "tails"))
    if not len(clean) == len(corrupt) == TOKENS:
        raise RuntimeError(f"the pair has {len(clean)} and {len(corrupt)} tokens instead of {TOKENS}")
    clean, corrupt = clean[:tokens], corrupt[:tokens]
    other_first = [model.encode("\n", add_special_tokens=False)[0], *corrupt[1:]]
    (heads,), (tails,) = (model.encode(answer, add_special_tokens=False) for answer in ANSWERS)
    sides, farthest = (heads, tails), farthest_apart(model, clean, corrupt)
    pair = compare(model, clean, corrupt, sides, rounds)
    every_cell = compare(model, clean, other_first, sides, rounds=1)
    wide = cp.load_model("smollm2-135m", dtype="float64")
    began = time.perf_counter()
    distances = precision(model, wide, clean, corrupt, sides, pair.found)
    say("both sweeps in float64", time.perf_counter() - began)
    return {
        "benchmark": "patching",
        "rounds": rounds,
        "grid": [model.n_layers, tokens],
        "speedup_over_transformerlens": pair.told["speedup"],
        "speedup_where_the_first_token_differs": every_cell.told["speedup"],
        "pair": pair.told,
        "first_token_differs": every_cell.told,
        "precision": distances,
        "prefix": sanity(model, clean, corrupt, farthest),
        "prefix_heads_and_tails": sanity(model, clean, corrupt, sides),
        "prefix_in_float64": sanity(wide, clean, corrupt, farthest),
        "prefix_heads_and_tails_in_float64": sanity(wide, clean, corrupt, sides),
        "weights": model.weights_note,
        **machine(),
    }


def compare(
    model: PlainLM, clean: Sequence[int], corrupt: Sequence[int], answer: tuple[int, int], rounds: int
) -> Compared:
    """Both sweeps of one pair: seconds, the ratio of medians, and how far apart the numbers are."""
    our_sweep(model, clean, corrupt, answer)  # once untimed
    with torch.inference_mode():
        model.bridge(torch.tensor([clean]))
    seconds: dict[str, list[float]] = {name: [] for name in SWEEPS}
    found: dict[str, Tensor] = {}
    with measuring(rounds * len(SWEEPS)) as bar:
        for _ in range(rounds):
            for name, sweep in SWEEPS.items():
                began = time.perf_counter()
                found[name] = sweep(model, clean, corrupt, answer)
                seconds[name].append(time.perf_counter() - began)
                bar.advance(note=f"{name} {seconds[name][-1]:.1f} s")
    medians = {name: median(values) for name, values in seconds.items()}
    theirs = found["transformerlens"]
    told = {
        "speedup": round(medians["transformerlens"] / medians["ours"], 2),
        "seconds_median": {name: round(value, 2) for name, value in medians.items()},
        "largest_difference": apart(found["ours"], theirs),
        "spread": float(theirs.max() - theirs.min()),
    }
    return Compared(told, found)
