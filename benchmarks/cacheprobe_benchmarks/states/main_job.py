"""What recording costs: 16 coin-flip prompts x 32 new tokens on SmolLM2, greedy, bfloat16, 2 threads.

Against Hugging Face `generate` of the same batch with nothing captured, on a separately loaded copy with its default
attention; end-of-sequence ignored. Hugging Face runs before and after each of our jobs, and a ratio is to the mean of
the two: a machine that is slower for a while is then slower for both. With half of the requests deterministic, a verify
pass is a decode of a fixed height in which the others ride along. Batch 1 is one longer coin-flip prompt after another
with n-gram drafts, each beside Hugging Face's. _over_roofline is to the least time of the job's products: its
multiplications and bytes at the best rates of any product and copy, which are measured after the rounds.
share_of_seconds says where the time goes: by part of cacheprobe, from samples of further runs.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from statistics import mean, median
from typing import Any

import torch

import cacheprobe as cp
from cacheprobe.models.base import CachedLM
from cacheprobe_benchmarks.shared.hugging_face import HuggingFace
from cacheprobe_benchmarks.shared.machine import machine, measuring
from cacheprobe_benchmarks.shared.profile import shares
from cacheprobe_benchmarks.shared.workload import side_by_side, stored_prompts
from cacheprobe_benchmarks.speed import products
from cacheprobe_benchmarks.speed.roofline import Roofline
from cacheprobe_benchmarks.speed.speculation import ALONE, NUM_ALONE
from cacheprobe_benchmarks.speed.speculation import NEW_TOKENS as NEW_TOKENS_ALONE

NEW_TOKENS = 32
SMALL = {"requests": 2, "new_tokens": 2, "alone": 1, "alone_tokens": 2, "shapes": products.SMALL["shapes"]}
SHAPE = dict(capacity=96, window=1, group=16)
"""The capacity holds the longest prompt and its answer; the rest is what `cp.run` chooses for a CPU."""

JOBS: dict[str, dict[str, Any]] = {
    "stc": dict(capture="STC"),
    "stcz": dict(capture="STCZ"),
    "stcz_half_deterministic": dict(capture="STCZ", deterministic=0.5),
}


def coin_prompts(requests: int = 16) -> list[str]:
    """Those of data/coin_flip_bench.jsonl, which a wheel does not have."""
    return [example.prompt for example in cp.tasks.CoinFlip(people=4).examples(n=requests, seed=0)]


def run(
    rounds: int, *, requests: int = 16, new_tokens: int = NEW_TOKENS, alone: int = NUM_ALONE,
    alone_tokens: int = NEW_TOKENS_ALONE, shapes: Any = products.SHAPES,
) -> dict[str, Any]:  # fmt: skip
    """Ratios of seconds, medians over rounds; lower is better, 1.0 is Hugging Face with nothing kept, or the roofline.

    alone, alone_tokens: number of prompts of the batch-1 job, and new tokens of each.  shapes: of the roofline's
    products.
    """
    torch.set_num_threads(2)
    hf, model = HuggingFace(), cp.load_model("smollm2-135m", dtype="bfloat16")
    ids = [list(model.encode(prompt)) for prompt in coin_prompts(requests)]
    singles = [list(model.encode(text)) for text in stored_prompts("coin")[:alone]]

    def theirs() -> float:
        """Returns Hugging Face's seconds for the batch."""
        return _timed(lambda: hf.generate(ids, new_tokens), new_tokens)

    def ours_of(name: str) -> float:
        """Returns our seconds for one job."""
        return _timed(lambda: recorded(model, ids, new_tokens, **SHAPE, **JOBS[name]), new_tokens)

    ratios, seconds = defaultdict(list), defaultdict(list)
    with measuring((rounds + 1) * (len(JOBS) + 1)) as bar:
        for number in range(rounds + 1):
            before = theirs()
            for name in JOBS:
                ours, after = ours_of(name), theirs()
                if number:  # the first round is not timed: first calls allocate, and the fixed shapes are tried
                    ratios[name].append(ours / mean((before, after)))
                    seconds[name].append(ours)
                    seconds["hf"].append(after)
                before = after
                bar.advance(note=f"{name} {ours:.1f} s")
            took = side_by_side(
                {
                    "ours": _drafted(model, singles, alone_tokens),
                    "hf": hf.in_turn([([prompt], alone_tokens) for prompt in singles]),
                }
            )
            if number:
                ratios["batch1_speculation"].append(took["ours"] / took["hf"])
            bar.advance(note=f"batch 1 {took['ours']:.1f} s")
    spent = {name: shares(lambda name=name: ours_of(name), rounds) for name in JOBS}
    rates = products.rates(products.REPEATS, shapes)
    least = least_seconds(Roofline.of(model, rates), model.n_layers, ids, new_tokens)
    return {
        "benchmark": "main-job",
        "prompts": len(ids),
        "new_tokens": new_tokens,
        "rounds": rounds,
        "products": model.operations.text if model.operations else "torch",
        **{f"{name}_ratio": round(median(of_rounds), 2) for name, of_rounds in ratios.items()},
        **{f"{name}_over_roofline": round(median(seconds[name]) / took, 2) for name, took in least.items()},
        "best_gflops": round(rates.best_gflops, 1),
        "copy_gb_per_second": round(rates.copy_gb_per_second, 2),
        "of_each_round": {f"{name}_ratio": [round(one, 2) for one in of_rounds] for name, of_rounds in ratios.items()},
        "seconds_median": {name: round(median(taken), 2) for name, taken in seconds.items()},
        "share_of_seconds": spent,
        "seconds_of_roofline": {name: round(took, 2) for name, took in least.items()},
        **machine(),
    }


def least_seconds(roofline: Roofline, layers: int, prompts: list[list[int]], new_tokens: int) -> dict[str, float]:
    """Returns the roofline's seconds of each job: of the prompts, of every new token of the batch, and of Z's.

    Prompts are read in one pass, but for the deterministic half, which has passes of its own shape; a verify pass is a
    decode of all of them. Only real tokens count.
    """
    batch, total = len(prompts), sum(map(len, prompts))
    half = sum(map(len, prompts[: batch // 2]))
    decodes, heads = [batch] * (new_tokens - 1), [batch] * new_tokens
    of_z = roofline.seconds([], [batch * layers] * new_tokens)
    stc = roofline.seconds([total, *decodes], heads)
    apart = roofline.seconds([total - half, half, *decodes], heads)
    return {"stc": stc, "stcz": stc + of_z, "stcz_half_deterministic": apart + of_z}


def _timed(job: Callable[[], list[list[int]]], new_tokens: int) -> float:
    began = time.perf_counter()
    tokens = job()
    took = time.perf_counter() - began
    if any(len(ids) != new_tokens for ids in tokens):
        raise RuntimeError(f"{[len(ids) for ids in tokens]} tokens were generated instead of {new_tokens} each")
    return took


def recorded(model: CachedLM, prompts: list[list[int]], new_tokens: int, **settings: Any) -> list[list[int]]:
    sampling = cp.SamplingParams(stop_token_ids=(), max_new_tokens=new_tokens)
    trace = cp.run(model, prompts, sampling=sampling, progress=False, **settings)
    return [trace.committed(i) for i in range(len(prompts))]


def _drafted(model: CachedLM, prompts: list[list[int]], new_tokens: int) -> Iterator[float]:
    shape = dict(
        window=ALONE.window, group=1, capacity=ALONE.capacity, max_batch=1,
        prefill_chunk=ALONE.prefill_chunk, pad_prefill=ALONE.pad_prefill,
    )  # fmt: skip
    for number, prompt in enumerate(prompts, 1):
        drafter = cp.drafters.NGram(length=ALONE.window - 1)
        recorded(model, [prompt], new_tokens, capture="STC", drafter=drafter, **shape)
        yield number / len(prompts)
