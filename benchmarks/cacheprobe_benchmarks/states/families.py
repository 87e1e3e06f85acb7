"""What recording costs on models of several families, over transformers' `generate` with forward hooks.

Both sides generate the same prompts greedily and keep S, T and C of every layer and token. hooks_ratio is `cp.run` over
`generate` with hooks that copy these states. lens_ratio adds Z: `cp.run` with readings of every layer at each generated
token, over hooks and a logit lens (final norm, unembedding, top 5 and entropy) of the same rows. Random weights, sizes
of 100 to 300 million; medians of alternated rounds in one process, at the settings that a user gets; 2 threads.
"""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import transformers

import cacheprobe as cp
from cacheprobe.core.live import LiveModule
from cacheprobe_benchmarks.shared.hooks import Hooks, lens_by_torch
from cacheprobe_benchmarks.shared.hugging_face import generated
from cacheprobe_benchmarks.shared.machine import machine, measuring

DTYPES = ("bfloat16", "float32")
SIZES: dict[str, tuple[str, dict[str, Any]]] = {  # class name without its ending, and settings
    "qwen3": ("Qwen3", dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=8, num_attention_heads=16,
                            num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=True)),
    "olmo2": ("Olmo2", dict(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12,
                            num_key_value_heads=12, vocab_size=100352)),
    "phi3": ("Phi3", dict(hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
                          num_key_value_heads=12, vocab_size=32064)),
    "gpt-neox": ("GPTNeoX", dict(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12,
                                 vocab_size=50304)),
    "gemma2": ("Gemma2", dict(hidden_size=640, intermediate_size=2560, num_hidden_layers=12, num_attention_heads=4,
                              num_key_value_heads=1, head_dim=256, vocab_size=256000)),
    "qwen3-moe": ("Qwen3Moe", dict(hidden_size=768, moe_intermediate_size=768, intermediate_size=2048,
                                   num_hidden_layers=8, num_attention_heads=12, num_key_value_heads=4, head_dim=64,
                                   num_experts=8, num_experts_per_tok=2, vocab_size=50304)),
}  # fmt: skip
PROMPT_TOKENS, PROMPTS, NEW_TOKENS = 24, 8, 24
SMALL = {"families": ("phi3",), "dtypes": ("bfloat16",), "new_tokens": 2, "scale": 8}


def run(
    rounds: int, *, families: Sequence[str] = tuple(SIZES), dtypes: Sequence[str] = DTYPES,
    new_tokens: int = NEW_TOKENS, scale: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """hooks_ratio and lens_ratio of each family and dtype: lower is better. scale: divides the vocabulary."""
    torch.set_num_threads(2)
    measured: dict[str, Any] = {}
    with measuring((rounds + 1) * 4 * len(families) * len(dtypes)) as bar:
        for family in families:
            for dtype in dtypes:
                live = random_model(family, getattr(torch, dtype), scale)
                prompts = random_prompts(int(live.config.vocab_size))
                measured[f"{family} {dtype}"] = ratios(live, live, prompts, new_tokens, rounds, bar.advance)
                del live
    return {
        "benchmark": "families",
        "rounds": rounds,
        "prompts": PROMPTS,
        "new_tokens": new_tokens,
        "measured": measured,
        **machine(),
    }


def random_model(family: str, dtype: torch.dtype, scale: int = 1) -> LiveModule:
    """Returns a model of real size with random weights, whose generation does not end."""
    name, settings = SIZES[family]
    shape = {**settings, "vocab_size": settings["vocab_size"] // scale}
    config = getattr(transformers, f"{name}Config")(
        **shape, eos_token_id=None, bos_token_id=None, pad_token_id=None, initializer_range=0.05
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    finally:
        torch.set_default_dtype(before)
    model.generation_config.eos_token_id = None
    return model


def random_prompts(vocab: int) -> list[list[int]]:
    """Returns prompts of one length, so that nobody pads."""
    draw = torch.Generator().manual_seed(0)
    return torch.randint(10, vocab, (PROMPTS, PROMPT_TOKENS), generator=draw).tolist()


def ratios(
    live: LiveModule, model: Any, prompts: list[list[int]], new_tokens: int, rounds: int, report: Callable[[], None]
) -> dict[str, Any]:
    """Returns hooks_ratio and lens_ratio of one model, and the seconds. model: what `cp.load_model` takes."""
    loaded = cp.load_model(model, progress=False) if isinstance(model, torch.nn.Module) else model
    hooks = Hooks(live)

    def theirs(reads: bool) -> None:
        """Generates with hooks, and reads the lens if `reads`."""
        with hooks:
            generated(live, prompts, new_tokens)
        if reads:
            lens_by_torch(live, hooks.generated_rows())

    def ours(sites: str) -> None:
        """Generates and records."""
        sampling = cp.SamplingParams(stop_token_ids=(), max_new_tokens=new_tokens)
        cp.run(loaded, prompts, sampling=sampling, capture=sites, progress=False)

    jobs: dict[str, Callable[[], None]] = {
        "hooks": lambda: theirs(False),
        "stc": lambda: ours("STC"),
        "lens": lambda: theirs(True),
        "stcz": lambda: ours("STCZ"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    with torch.inference_mode():
        for number in range(rounds + 1):
            for name, job in jobs.items():
                began = time.perf_counter()
                job()
                if number:  # the first round is not timed: first calls allocate, compile and try shapes
                    seconds[name].append(time.perf_counter() - began)
                report()
    medians = {name: median(taken) for name, taken in seconds.items()}
    return {
        "hooks_ratio": round(medians["stc"] / medians["hooks"], 2),
        "lens_ratio": round(medians["stcz"] / medians["lens"], 2),
        "seconds_median": {name: round(value, 3) for name, value in medians.items()},
    }
