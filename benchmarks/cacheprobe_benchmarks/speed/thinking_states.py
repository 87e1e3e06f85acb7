"""What thinking while it reads costs a model: the shipped coin-flip models, prompts of 20 people, one thread.

Seconds over those of the plain backbone, which reads the same prompts in one pass and thinks nothing. The thinking
model has a thought in every chunk in which a state is known, so a pass of n such chunks takes n rounds: the last
thought asks for none. Reading chunk by chunk makes fewer rows, one pass makes fewer passes. Thoughts are decoded either
way, each by itself.
"""

import time
from statistics import median
from typing import Any

import torch

import cacheprobe as cp
from cacheprobe.models.base import CachedLM
from cacheprobe_benchmarks.shared.machine import machine, measuring

PEOPLE, PROMPTS, CHUNKS = 20, 4, (1, 4, 16, 64)
"""CHUNKS: chunks in a pass."""
SMALL = {"people": 3}


def run(rounds: int, *, people: int = PEOPLE) -> dict[str, Any]:
    """thinking_over_plain: by chunks in a pass, lower is better."""
    torch.set_num_threads(1)
    thinking, plain = (cp.load_model(name) for name in ("coinflip-thinking", "coinflip-plain"))
    prompts = [example.prompt for example in cp.tasks.CoinFlip(people=people).examples(n=PROMPTS, seed=0)]
    longest = max(len(thinking.encode(prompt)) for prompt in prompts)
    jobs: dict[int | None, tuple[CachedLM, int]] = {None: (plain, longest)}
    jobs |= {count: (thinking, count * thinking.chunk) for count in CHUNKS}
    taken: dict[int | None, list[float]] = {name: [] for name in jobs}
    with measuring((rounds + 1) * len(jobs)) as bar:
        for number in range(rounds + 1):
            for name, (model, width) in jobs.items():
                seconds = _seconds(model, prompts, width)
                if number:  # the first round allocates
                    taken[name].append(seconds)
                bar.advance()
    ratios = {n: [a / b for a, b in zip(of, taken[None], strict=True)] for n, of in taken.items() if n}
    return {
        "benchmark": "thinking-states",
        "rounds": rounds,
        "prompt_tokens": longest,
        "chunk": thinking.chunk,
        "thinking_over_plain": {f"{n} chunks a pass": round(median(of), 2) for n, of in ratios.items()},
        "of_each_round": {f"{n} chunks a pass": [round(one, 2) for one in of] for n, of in ratios.items()},
        **machine(),
    }


def _seconds(model: CachedLM, prompts: list[str], width: int) -> float:
    longest = max(len(model.encode(prompt)) for prompt in prompts)
    shape = dict(
        prefill_chunk=width, pad_prefill=False, capacity=longest + width + 8, window=1, group=1, max_new_tokens=2
    )
    began = time.perf_counter()
    cp.run(model, prompts, deterministic=True, capture=None, progress=False, **shape)
    return time.perf_counter() - began
