"""What determinism costs: 64 requests on SmolLM2 in bfloat16, at most 16 in flight, a share of them deterministic.

Every setting is what `cp.run` takes by itself; that 16 requests are in flight belongs to the traffic. `kept_at_*` is
the throughput with that share of deterministic requests, divided by the throughput of the same traffic with none.
`*_stc` records S, T and C of every layer on both sides. `dvr_kept_at_*` asks for a window of 16, so that the fast path
drafts and the verifier checks, as in LLM-42: every token is computed twice. `dvr_floor_at_*` is the share that would be
kept if everything but the model's passes took no time. `invariant_kept_at_*` asks for determinism="invariant", and
`invariant_over_verify_at_*` is its time over that of `kept_at_*`; both are missing where a trial refuses it.

`base_over_hf` is our time for each token, with nothing deterministic, over Hugging Face's. Hugging Face decodes static
batches of 16 to the longest request's length, and every token that it makes counts. All settings advance side by side
in one process, step by step, so that no ratio compares two minutes of the machine.
"""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import torch

import cacheprobe as cp
from cacheprobe.core.progress import Progress
from cacheprobe.engine.shapes import ShapeRefused
from cacheprobe_benchmarks.shared.hugging_face import HuggingFace
from cacheprobe_benchmarks.shared.machine import machine
from cacheprobe_benchmarks.shared.workload import (
    IN_FLIGHT,
    NEW_TOKENS,
    NUM_REQUESTS,
    Run,
    Timing,
    marked,
    side_by_side,
    traffic,
)

SHARES, STC_SHARES, DVR_SHARES, INVARIANT_SHARES = (2, 10, 50, 100), (10, 100), (10, 100), (2, 100)
AT_DEFAULTS: dict[str, Any] = dict(max_batch=IN_FLIGHT)
DVR: dict[str, Any] = dict(window=16, **AT_DEFAULTS)
INVARIANT: dict[str, Any] = dict(determinism="invariant", **AT_DEFAULTS)

SETTINGS: dict[str, tuple[int, dict[str, Any], str | None]] = {
    "base": (0, AT_DEFAULTS, None),
    **{f"kept_at_{share}": (share, AT_DEFAULTS, None) for share in SHARES},
    "base_stc": (0, AT_DEFAULTS, "STC"),
    **{f"kept_at_{share}_stc": (share, AT_DEFAULTS, "STC") for share in STC_SHARES},
    **{f"dvr_kept_at_{share}": (share, DVR, None) for share in DVR_SHARES},
    **{f"invariant_kept_at_{share}": (share, INVARIANT, None) for share in INVARIANT_SHARES},
}
"""By name: per cent of the requests that are deterministic, what `cp.run` is given, and what is recorded."""

SMALL = {"num_requests": 4, "new_tokens": (2, 4)}


def run(rounds: int, *, num_requests: int = NUM_REQUESTS, new_tokens: tuple[int, int] = NEW_TOKENS) -> dict[str, Any]:
    """Shares of throughput kept (higher is better) and the base loop's time over Hugging Face's (lower is better)."""
    torch.set_num_threads(2)
    hf = HuggingFace()
    models = {name: cp.load_model("smollm2-135m", dtype="bfloat16") for name in ("plain", "base_stc", *_captured())}
    requests = traffic(models["plain"], num_requests=num_requests, new_tokens=new_tokens)
    settings = {name: SETTINGS[name] for name in SETTINGS if not _is_refused(models, requests, name)}
    for name, (share, shapes, capture) in settings.items():  # memory is touched
        for _ in Run(_model(models, name), marked(requests[:4], share / 100), shapes, capture=capture).steps():
            pass
    seconds: dict[str, list[float]] = {name: [] for name in ("hf", *settings)}
    last: dict[str, Timing] = {}
    with Progress(100 * rounds, "measuring", "per cent") as bar:
        for number in range(rounds):
            runs = {
                name: Run(_model(models, name), marked(requests, share / 100), shapes, capture=capture)
                for name, (share, shapes, capture) in settings.items()
            }
            batches = [([list(one.prompt) for one in batch], longest) for batch, longest in _batches(requests)]
            jobs = {"hf": hf.in_turn(batches), **{name: run.steps() for name, run in runs.items()}}
            for name, taken in side_by_side(jobs, lambda share, n=number: bar.set_done(int(100 * (n + share)))).items():
                seconds[name].append(taken)
                bar.say(f"{name}: {taken:.1f} s")
            last = {name: run.timing(seconds[name][-1]) for name, run in runs.items()}
    tokens = sum(map(len, last["base"].tokens))
    made_by_hf = sum(len(batch) * longest for batch, longest in _batches(requests))
    per_token = [one / tokens / (other / made_by_hf) for one, other in zip(seconds["base"], seconds["hf"], strict=True)]
    ratios = {"base_over_hf": per_token}
    for name in [name for name in settings if "kept" in name]:
        base = seconds["base_stc" if name.endswith("_stc") else "base"]
        ratios[name] = [one / other for one, other in zip(base, seconds[name], strict=True)]
    over_verify = [name for name in settings if name.startswith("invariant")]
    for name in over_verify:
        pairs = zip(seconds[name], seconds[name.removeprefix("invariant_")], strict=True)
        ratios[name.replace("kept", "over_verify")] = [one / other for one, other in pairs]
    floors = {}  # of the last round
    for share in DVR_SHARES:
        passes = sum(step.seconds for step in last[f"dvr_kept_at_{share}"].log.steps)
        floors[f"dvr_floor_at_{share}"] = round(seconds["base"][-1] / passes, 2)
    return {
        "benchmark": "determinism",
        "rounds": rounds,
        "requests": len(requests),
        "new_tokens": tokens,
        "new_tokens_of_hf": made_by_hf,
        **{name: round(median(of_rounds), 2) for name, of_rounds in ratios.items()},
        **floors,
        "lower_is_better": ["base_over_hf", *(name.replace("kept", "over_verify") for name in over_verify)],
        "of_each_round": {name: [round(one, 2) for one in of_rounds] for name, of_rounds in ratios.items()},
        "base_tokens_per_second": round(tokens / median(seconds["base"]), 1),
        "costs": {name: costs(last[name]) for name in settings if "kept" in name},
        **machine(),
    }


def _is_refused(models: dict[str, Any], requests: Sequence[cp.Request], name: str) -> bool:
    """Tries a setting's shapes with all requests. Returns True, and says why, if determinism="invariant" is refused."""
    share, shapes, capture = SETTINGS[name]
    try:
        Run(_model(models, name), marked(requests, share / 100), shapes, capture=capture)
    except ShapeRefused as error:
        if shapes is not INVARIANT:
            raise
        print(f"{name}: {error}")
        return True
    return False


def _captured() -> list[str]:
    return [name for name in SETTINGS if name.endswith("_stc") and name != "base_stc"]


def _model(models: dict[str, Any], name: str) -> Any:
    """Runs that record advance in turn, so each has a model of its own."""
    return models.get(name, models["plain"])


def costs(result: Timing) -> dict[str, float | int]:
    """Where the time went: rollbacks, tokens computed again, rows verified and padded, time that others stood still."""
    verify = [step for step in result.log.steps if step.phase == "verify"]
    verdicts = [verdict for step in verify for verdict in step.verdicts]
    rows = sum(step.batch_shape[0] * step.batch_shape[1] for step in verify)
    real = sum(len(v.target_token_ids) for v in verdicts) + sum(len(step.committed) for step in verify)
    drafted = sum(len(v.draft_token_ids) for v in verdicts)
    committed = sum(v.num_committed for v in verdicts)
    return {
        "rollbacks": sum(v.is_rollback for v in verdicts),
        "recomputed_percent": round(100 * drafted / committed, 1) if committed else 0.0,
        "rows_verified": rows,
        "padding_percent": round(100 * (rows - real) / rows, 1) if rows else 0.0,
        # passes in which no other request moved on
        "stall_seconds": round(sum(step.seconds for step in verify if not step.committed), 1),
    }


def _batches(requests: Sequence[cp.Request]) -> Iterator[tuple[Sequence[cp.Request], int]]:
    """Hugging Face's batches, in the order of arrival, and the tokens that each of their requests is decoded to."""
    for i in range(0, len(requests), IN_FLIGHT):
        batch = requests[i : i + IN_FLIGHT]
        yield batch, max(request.sampling.max_new_tokens for request in batch)
