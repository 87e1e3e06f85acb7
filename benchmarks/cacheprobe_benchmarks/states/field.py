"""What the field's own ways of recording cost: the prompts of the main job, over Hugging Face with nothing kept.

SmolLM2, bfloat16, 2 threads, greedy, prompts cut to one length so that nobody pads. `hooks`: a forward hook on every
block, attention and MLP that clones what passes: S, T and C without positions or roles. `hidden_states`: what generate
returns when asked, S alone. `transformer_lens`: the bridge generates, runs once more with a cache of S, T and C, and
reads every layer of every generated token (top-5, log-sum-exp, entropy, rank). `ours` is S, T, C and the same reading.
Hugging Face with nothing kept runs before and after each; a ratio is to the mean of the two. `nnsight` saves S, T and C
in a process of its own, beside its own Hugging Face model; where it cannot be had, `nnsight_left_out` says why.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor

import cacheprobe as cp
from cacheprobe.models.plain.lm import PlainLM
from cacheprobe.ops.readout import read_logits
from cacheprobe_benchmarks.shared.hugging_face import HuggingFace
from cacheprobe_benchmarks.shared.machine import machine, measuring
from cacheprobe_benchmarks.states.main_job import NEW_TOKENS, SHAPE, coin_prompts
from cacheprobe_benchmarks.states.nnsight_arm import measure as measure_nnsight

RESIDUAL, WRITES = "hook_resid_post", ("hook_attn_out", "hook_mlp_out")
TOP = 5
SMALL = {"requests": 1, "new_tokens": 2}


def run(rounds: int, *, requests: int = 16, new_tokens: int = NEW_TOKENS) -> dict[str, Any]:
    """Ratios of seconds, medians over rounds; lower is better. kept: what each arm holds at the end, in megabytes."""
    torch.set_num_threads(2)
    hf, model = HuggingFace(), cp.load_model("smollm2-135m", dtype="bfloat16")
    ids = [list(model.encode(prompt)) for prompt in coin_prompts(requests)]
    return measure(hf, model, [prompt[: min(map(len, ids))] for prompt in ids], rounds, new_tokens)


def measure(hf: HuggingFace, model: PlainLM, prompts: list[list[int]], rounds: int, new_tokens: int) -> dict[str, Any]:
    """The same of models that are loaded, and prompts of one length."""
    arms: dict[str, Callable[[], float]] = {
        "ours": lambda: _ours(model, prompts, new_tokens),
        "hooks": lambda: _hooks(hf, prompts, new_tokens),
        "hidden_states": lambda: _hidden_states(hf, prompts, new_tokens),
        "transformer_lens": lambda: _transformer_lens(model, prompts, new_tokens),
    }
    ratios: dict[str, list[float]] = defaultdict(list)
    kept: dict[str, float] = {}
    left_out: dict[str, str] = {}
    with measuring((rounds + 1) * len(arms) + rounds) as bar:
        for number in range(rounds + 1):
            before = _seconds(lambda: hf.generate(prompts, new_tokens))
            for name, arm in arms.items():
                began = time.perf_counter()
                kept[name] = round(arm() / 10**6)
                took = time.perf_counter() - began
                after = _seconds(lambda: hf.generate(prompts, new_tokens))
                if number:  # the first round allocates
                    ratios[name].append(took / mean((before, after)))
                before = after
                bar.advance(note=f"{name} {took:.1f} s")
        try:
            for took, beside, size in measure_nnsight(prompts, new_tokens, rounds):
                ratios["nnsight"].append(took / beside)
                kept["nnsight"] = round(size / 10**6)
                bar.advance(note=f"nnsight {took:.1f} s")
        except RuntimeError as error:
            for held in (ratios, kept):
                held.pop("nnsight", None)
            left_out["nnsight_left_out"] = str(error)
    return {
        "benchmark": "field",
        "rounds": rounds,
        "new_tokens": new_tokens,
        **{f"{name}_ratio": round(median(of_rounds), 2) for name, of_rounds in ratios.items()},
        **left_out,
        "kept_mb": kept,
        "of_each_round": {f"{name}_ratio": [round(one, 2) for one in of_rounds] for name, of_rounds in ratios.items()},
        **machine(),
    }


def _seconds(job: Callable[[], Any]) -> float:
    began = time.perf_counter()
    job()
    return time.perf_counter() - began


def _bytes(tensors: list[Tensor]) -> float:
    return float(sum(tensor.numel() * tensor.element_size() for tensor in tensors))


def _ours(model: PlainLM, prompts: list[list[int]], new_tokens: int) -> float:
    sampling = cp.SamplingParams(stop_token_ids=(), max_new_tokens=new_tokens)
    trace = cp.run(model, prompts, sampling=sampling, progress=False, capture="STCZ", **SHAPE)
    return _bytes([trace.store.all_of(site, layer) for site in trace.store.sites for layer in trace.store.layers])


def _hooks(hf: HuggingFace, prompts: list[list[int]], new_tokens: int) -> float:
    kept: list[Tensor] = []

    def keep(module: Any, inputs: Any, output: Any) -> None:
        kept.append((output[0] if isinstance(output, tuple) else output).clone())

    places = [part for block in hf.model.model.layers for part in (block, block.self_attn, block.mlp)]
    handles = [place.register_forward_hook(keep) for place in places]
    try:
        hf.generate(prompts, new_tokens)
    finally:
        for handle in handles:
            handle.remove()
    return _bytes(kept)


def _hidden_states(hf: HuggingFace, prompts: list[list[int]], new_tokens: int) -> float:
    ids = torch.tensor(prompts)
    with torch.inference_mode():
        out = hf.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=new_tokens,
            pad_token_id=0,
            output_hidden_states=True,
            return_dict_in_generate=True,
        )
    return _bytes([states for step in out.hidden_states for states in step])


def _transformer_lens(model: PlainLM, prompts: list[list[int]], new_tokens: int) -> float:
    bridge = model.bridge
    with torch.inference_mode():
        ids = bridge.generate(
            torch.tensor(prompts), max_new_tokens=new_tokens, do_sample=False, stop_at_eos=False, verbose=False
        )
        names = [f"blocks.{layer}.{end}" for layer in range(model.n_layers) for end in (RESIDUAL, *WRITES)]
        _, cache = bridge.run_with_cache(ids, names_filter=lambda name: name in names)
        last = slice(len(prompts[0]) - 1, -1)  # what stands before each generated token
        said = ids[:, len(prompts[0]) :].reshape(-1)
        for layer in range(model.n_layers):
            states = cache[f"blocks.{layer}.{RESIDUAL}"][:, last]
            read_logits(bridge.unembed(bridge.ln_final(states)).flatten(0, 1), said, TOP)
        return _bytes([cache[name] for name in names])
