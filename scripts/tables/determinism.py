"""Tables of the stored measurements of determinism and speculation."""

import json
from pathlib import Path
from typing import Any

from cacheprobe_analyses.records import markdown_table

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
STRESS = {
    "stress": "make stress TOKENS=200000 OUT=runs/stress",
    "stress-avx2": "ONEDNN_MAX_CPU_ISA=AVX2 make stress TOKENS=50000 OUT=runs/stress-avx2",
    "stress-compatible": "MKL_CBWR=COMPATIBLE make stress TOKENS=50000 OUT=runs/stress-compatible",
    "stress-amd": "make stress TOKENS=50000 OUT=runs/stress-amd",
    "stress-amd-avx2": "ONEDNN_MAX_CPU_ISA=AVX2 make stress TOKENS=50000 OUT=runs/stress-amd-avx2",
    "stress-amd-compatible": "MKL_CBWR=COMPATIBLE make stress TOKENS=50000 OUT=runs/stress-amd-compatible",
}
"""By stored result: a command that compares as many tokens. Traffic is drawn until there are at least that many."""
COUNTS = {
    "processor": "processor",
    "compared_tokens": "compared tokens",
    "distinct_tokens": "of them distinct",
    "real_model_compared_tokens": "compared tokens of SmolLM2",
    "models": "models",
    "requests_deterministic": "deterministic requests",
    "requests_drafted_only": "other requests with a drafter",
    "requests_with_states_compared": "requests whose states were compared",
    "mixed_episodes": "mixed episodes",
    "mixed_states_and_heads_compared": "states and heads compared in them",
    "preemptions": "preemptions",
    "rollbacks_injected": "injected rollbacks",
    "rollbacks_natural": "natural rollbacks",
    "shapes_refused_by_trial": "shapes refused by the trial",
    "differences": "**differences**",
    "control_sequences": "negative control: sequences",
    "control_unverified_differ": "that differ without verification",
    "control_verified_differ": "that differ with it",
    "seconds": "seconds, on a machine with other load",
}
DETERMINISM = ("determinism", "determinism-amd")
KEPT = {
    "kept_at_2": "2 % deterministic",
    "kept_at_10": "10 %",
    "kept_at_50": "50 %",
    "kept_at_100": "100 %",
    "kept_at_10_stc": "10 %, S, T and C recorded",
    "kept_at_100_stc": "100 %, S, T and C recorded",
    "dvr_kept_at_10": "10 %, `window=16`",
    "dvr_kept_at_100": "100 %, `window=16`",
    "base_over_hf": "none: time for each token over Hugging Face's",
}
GAINED = {
    "repeat_over_greedy": "`repeat` over Hugging Face",
    "coin_over_greedy": "`coin` over Hugging Face",
    "batch8_over_greedy": "`batch8` over Hugging Face",
    "repeat_over_undrafted": "`repeat` over our loop without drafts",
    "batch8_over_undrafted": "`batch8` over our loop without drafts",
    "coin_over_best_hf": "`coin` over Hugging Face, with or without prompt lookup",
    "repeat_over_best_hf": "`repeat` over Hugging Face, with or without prompt lookup",
}


def tables() -> dict[str, str]:
    """Returns by name: stored results as one table, with their commands."""
    return {"stress": _stress_results(), "determinism": _determinism(), "speculation": _speculation()}


def _stress_results() -> str:
    held = {name: _read(name) for name in STRESS}
    commands = "\n".join(f"{number}. `{command}`" for number, command in enumerate(STRESS.values(), 1))
    rows = [[said, *(result.get(name, "not recorded") for result in held.values())] for name, said in COUNTS.items()]
    return f"{commands}\n\n{markdown_table(('', *map(str, range(1, 1 + len(held)))), rows)}"


def _determinism() -> str:
    held = [_read(name) for name in DETERMINISM]
    table = markdown_table(
        ("requests", *(one["cpu"] for one in held)),
        [(said, *(one[name] for one in held)) for name, said in KEPT.items()],
    )
    return f"{_command(held[0])}; {_machine(held[0])}:\n\n{table}"


def _speculation() -> str:
    held = _read("speculation")
    rows = [(said, held[name]) for name, said in GAINED.items()]
    table = markdown_table(("tokens per second", "ratio"), rows)
    return f"{_command(held)}; {held['cpu']}, {_machine(held)}:\n\n{table}"


def _command(held: dict[str, Any]) -> str:
    name = held["benchmark"]
    return f"`cacheprobe bench {name} --rounds {held['rounds']} --json benchmarks/results/{name}.json`"


def _machine(held: dict[str, Any]) -> str:
    return f"{held['threads']} threads, torch {held['torch']}, transformers {held['transformers']}"


def _read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
