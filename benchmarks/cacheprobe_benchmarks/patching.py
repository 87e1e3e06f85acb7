"""What sharing saves: a patching grid of the residual stream against TransformerLens' own sweep of the same grid.

SmolLM2 in float32, all layers x all positions of a pair of 24 tokens, in one process with the same threads. Theirs is
`transformer_lens.patching.get_act_patch_resid_pre` on the very bridge whose weights our twin shares. Two pairs: a coin
that lies heads and one that lies tails, where what stands before that word is the same in both runs and costs us
nothing; and the same with another first token too, so that every cell has to be computed.
"""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformer_lens.patching import get_act_patch_resid_pre

import cacheprobe as cp
from cacheprobe.models.bridge import BridgeLM
from cacheprobe.patching.runs import run_once
from cacheprobe.tasks.coin_flip import ANSWERS, coin_question
from cacheprobe_benchmarks.machine import machine, measuring

PEOPLE = (("Tim", True), ("Arthur", True))
TOKENS = 24


def run(rounds: int) -> dict[str, Any]:
    """Ratios of seconds, theirs over ours, medians over interleaved rounds; higher is better. Pair two runs once."""
    torch.set_num_threads(2)
    model = cp.load_model("smollm2-135m", dtype="float32")
    clean, corrupt = (list(model.encode(coin_question(side, PEOPLE).text)) for side in ("heads", "tails"))
    if not len(clean) == len(corrupt) == TOKENS:
        raise RuntimeError(f"the pair has {len(clean)} and {len(corrupt)} tokens instead of {TOKENS}")
    apart = [model.encode("\n", add_special_tokens=False)[0], *corrupt[1:]]
    (heads,), (tails,) = (model.encode(answer, add_special_tokens=False) for answer in ANSWERS)
    pair = compare(model, clean, corrupt, (heads, tails), rounds)
    every_cell = compare(model, clean, apart, (heads, tails), rounds=1)
    return {
        "benchmark": "patching",
        "rounds": rounds,
        "grid": [model.n_layers, TOKENS],
        "speedup_over_transformerlens": pair["speedup"],
        "speedup_where_the_first_token_differs": every_cell["speedup"],
        "pair": pair,
        "first_token_differs": every_cell,
        "prefix": sanity(model, clean, corrupt, farthest_apart(model, clean, corrupt)),
        "prefix_heads_and_tails": sanity(model, clean, corrupt, (heads, tails)),
        "weights": model.weights_note,
        **machine(),
    }


def compare(
    model: BridgeLM, clean: Sequence[int], corrupt: Sequence[int], answer: tuple[int, int], rounds: int
) -> dict[str, Any]:
    """Both sweeps of one pair: seconds, the ratio of medians, and how far apart the numbers are.

    largest_difference: of the patched runs' logit differences, over the largest of these, or over 1 if that is more.
    """

    def sweep_theirs() -> Tensor:
        with torch.inference_mode():
            _, cache = model.bridge.run_with_cache(torch.tensor([clean]))
            return get_act_patch_resid_pre(model.bridge, torch.tensor([corrupt]), cache, difference)

    def difference(logits: Tensor) -> Tensor:
        return logits[0, -1, answer[0]] - logits[0, -1, answer[1]]

    def sweep_ours() -> Tensor:
        grid = cp.patching.activation(model, clean, corrupt, site="pre", answer=answer, progress=False)
        return torch.tensor(grid.matrix("logit_difference").to_numpy())

    jobs: dict[str, Callable[[], Tensor]] = {"ours": sweep_ours, "transformerlens": sweep_theirs}
    sweep_ours()  # once untimed: the twin is built and tried
    with torch.inference_mode():
        model.bridge(torch.tensor([clean]))
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    found: dict[str, Tensor] = {}
    with measuring(rounds * len(jobs)) as bar:
        for _ in range(rounds):
            for name, job in jobs.items():
                began = time.perf_counter()
                found[name] = job().double()
                seconds[name].append(time.perf_counter() - began)
                bar.advance(note=f"{name} {seconds[name][-1]:.1f} s")
    medians = {name: median(values) for name, values in seconds.items()}
    far = float((found["ours"] - found["transformerlens"]).abs().max())
    return {
        "speedup": round(medians["transformerlens"] / medians["ours"], 2),
        "seconds_median": {name: round(value, 2) for name, value in medians.items()},
        "largest_difference": far / max(1.0, float(found["transformerlens"].abs().max())),
        "spread": float(found["transformerlens"].max() - found["transformerlens"].min()),
    }


def farthest_apart(model: BridgeLM, clean: Sequence[int], corrupt: Sequence[int]) -> tuple[int, int]:
    """The two tokens between whose logits the texts make the largest difference."""
    ends = (run_once(model, tuple(text)).logits for text in (clean, corrupt))
    gain = next(ends).double() - next(ends).double()
    return int(gain.argmax()), int(gain.argmin())


def sanity(model: BridgeLM, clean: Sequence[int], corrupt: Sequence[int], answer: tuple[int, int]) -> dict[str, float]:
    """How far NLD is from 1 where everything is patched, and from 0 where nothing is: the largest over all layers.

    one_step: what the last bit of a logit is in NLD, which divides by how far apart the texts put the answers.
    """
    alike = [a == b for a, b in zip(clean, corrupt, strict=True)].index(False)
    grid = cp.patching.prefix(
        model, clean, corrupt, answer=answer, positions=[alike - 1, len(clean) - 1], progress=False
    )
    nld, position = grid.table.nld, grid.table.position
    apart = abs(grid.meta["clean_logit_difference"] - grid.meta["corrupt_logit_difference"])
    largest = run_once(model, tuple(clean)).logits[list(answer)].abs().max()
    return {
        "everything_is_off_one_by": float((nld[position == len(clean) - 1] - 1).abs().max()),
        "nothing_is_off_zero_by": float(nld[position == alike - 1].abs().max()),
        "apart": apart,
        "one_step": float(torch.nextafter(largest, torch.tensor(torch.inf)) - largest) / apart,
    }
