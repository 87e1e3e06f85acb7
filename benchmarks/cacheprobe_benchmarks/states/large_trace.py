"""How quickly a large saved run opens, and one token of it is shown: seconds and memory for a run of 20 GB.

The run is recorded to disk from a model with random weights, whose states are as large as those of one with 1B
parameters: 16 layers of 2,048 numbers at three sites in 16 bits, 200 kB a token. Its heads, MLP and vocabulary are
small, so that it runs quickly. Each reading is taken in a process of its own, which has imported the libraries before.
"""

import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

import cacheprobe as cp
from cacheprobe_benchmarks.shared.machine import machine, measuring
from cacheprobe_benchmarks.states.memory import resident_mb

SMALL = {"requests": 2, "tokens": 40, "hidden": 64}
VOCAB, CARDS = 256, 20


def run(rounds: int, *, requests: int = 52, tokens: int = 1_000, hidden: int = 2_048) -> dict[str, Any]:
    """Each request has a prompt of so many tokens, and generates as many.

    open_s, open_mb: `cp.load_trace`, and what it adds to the process.  states_s: the states of one request at one
    layer.  first_card_s: the dashboard's card of a token in a run that is not open yet; card_s: of later
    tokens."""
    with tempfile.TemporaryDirectory() as folder, measuring(1 + rounds) as bar:
        out = Path(folder) / "run"
        _record(out, requests, tokens, hidden)
        bar.advance()
        taken: list[dict[str, float]] = []
        for _ in range(rounds):
            code = f"from {__name__} import child; child({str(out)!r}, {requests}, {tokens})"
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"the measured process failed: {done.stderr.strip()[-300:]}")
            taken.append(json.loads(done.stdout.splitlines()[-1]))
            bar.advance()
        gigabytes = sum(path.stat().st_size for path in out.iterdir()) / 10**9
    return {
        "benchmark": "large-trace",
        "rounds": rounds,
        "gigabytes": round(gigabytes, 2),
        "tokens": 2 * requests * tokens,
        **{name: round(median(one[name] for one in taken), 3) for name in taken[0]},
        "lower_is_better": list(taken[0]),
        **machine(),
    }


def _record(out: Path, requests: int, tokens: int, hidden: int) -> None:
    """Records a run with S, T and C of all tokens, and Z of the generated ones."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(2)
    torch.manual_seed(0)
    heads = {"head_dim": 16, "num_attention_heads": 1, "num_key_value_heads": 1}
    shape = {"vocab_size": VOCAB, "hidden_size": hidden, "intermediate_size": 16, "num_hidden_layers": 16}
    config = LlamaConfig(**heads, **shape, eos_token_id=None, bos_token_id=None)
    model = cp.load_model(LlamaForCausalLM(config).to(torch.bfloat16).eval())
    rng = random.Random(0)
    prompts = [[rng.randrange(VOCAB) for _ in range(tokens)] for _ in range(requests)]
    sampling = cp.SamplingParams(stop_token_ids=(), max_new_tokens=tokens)
    cp.run(model, prompts, sampling=sampling, capture="STCZ", max_batch=16, out=out, progress=False)


def child(directory: str, requests: int, tokens: int) -> None:
    """Prints the seconds and megabytes as JSON."""
    from cacheprobe.views.dashboard.run_list import RunList
    from cacheprobe.views.dashboard.tabs import lens

    rng = random.Random(1)
    before, began = resident_mb("VmRSS"), time.perf_counter()
    trace = cp.load_trace(directory)
    figures = {"open_s": time.perf_counter() - began, "open_mb": resident_mb("VmRSS") - before}
    began = time.perf_counter()
    trace.states("S", rng.randrange(requests), 1)
    figures["states_s"] = time.perf_counter() - began
    run_list = RunList.of([Path(directory)])
    seconds = []
    for _ in range(CARDS):
        began = time.perf_counter()
        place = {"request": rng.randrange(requests), "position": tokens + rng.randrange(tokens - 1)}
        lens.RowCard(run_list, {"run": 0, "lens": "recorded", "site": "S", **place}).draw()
        seconds.append(time.perf_counter() - began)
    print(json.dumps({**figures, "first_card_s": seconds[0], "card_s": median(seconds[1:])}))
