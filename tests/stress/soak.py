"""Compares random traffic, bit for bit, with the slow reference (`cp.reference`), which computes each request alone.

`cp.verify` compares tokens, log-probabilities, states, heads and readings, of cancelled requests up to the last token.
A negative control shows that without verification the output of some traffic depends on the batch.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import cacheprobe as cp
from cacheprobe.models.settings import numeric_settings, processor_name
from tests.request_checks import checked_states
from tests.stress.subjects import REAL, Subject, in_accepted_shape, near_tie_subjects, real_subjects, tiny_subjects
from tests.stress.traffic import Corrupted, Episode, draw_episode, draw_request


@dataclass
class Tally:
    """Holds what a soak compared, and the differences that it found."""

    compared: Counter[str] = field(default_factory=Counter)
    """Number of tokens compared, by subject."""
    counts: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    """Reason for each refused shape of passes, by subject and shape."""


def one_episode(subject: Subject, tally: Tally, seed: Sequence[int], most_requests: int) -> None:
    """Runs one episode of random traffic, and adds what was compared and every difference to `tally`."""

    def compute(shape: Subject) -> tuple[Episode, cp.Trace]:
        """Draws the episode in this shape and runs it, as a stream if it is one."""
        drawn = draw_episode(shape, seed, most_requests)
        settings = {**shape.settings, **drawn.settings}
        if not drawn.is_stream:
            return drawn, cp.run(shape.model, drawn.requests, **settings, progress=False)
        pieces = cp.stream(shape.model, drawn.requests, **settings)
        for number, _ in enumerate(pieces, 1):
            for request_id, after in drawn.cancelled.items():
                if number == after:
                    pieces.cancel(request_id)
        return drawn, pieces.trace()

    shape, (drawn, trace) = in_accepted_shape(subject, tally.refused, compute)
    where = f"{shape.key}, seed {list(seed)}"
    tally.differences += [f"{where}: request {i} ended with {error}" for i, error in trace.meta["errors"].items()]
    if not trace.meta["errors"]:
        compared = cp.verify(trace, shape.model, progress=False)
        if compared.first_difference is not None:
            tally.differences.append(f"{where}: {compared.first_difference}")
        tally.compared[subject.name] += compared.num_tokens
        tally.counts["states_and_heads_compared"] += compared.num_states
        tally.counts["readings_compared"] += compared.num_readings
    _count(tally.counts, trace, drawn)


def _count(counts: Counter[str], trace: cp.Trace, drawn: Episode) -> None:
    is_own = drawn.drafter_name in ("none", "fast_path")  # the fast path itself said another token than the verifier
    is_natural = is_own and drawn.settings["acceptance"] == "equality"
    kind = "injected" if isinstance(drawn.settings["drafter"], Corrupted) else "natural" if is_natural else "other"
    cancelled = sum(reason == "cancelled" for reason in trace.meta["finish"].values())
    seen = dict.fromkeys(trace.store.heads, True) | {f"drafter {drawn.drafter_name}": True}
    counts.update(f"episodes with {name}" for name in seen)
    counts[f"rollbacks_{kind}"] += trace.num_rolled_back
    counts["episodes"] += 1
    counts["requests_deterministic"] += sum(request.is_deterministic for request in drawn.requests)
    counts["interventions"] += len(drawn.settings["interventions"])
    counts["streams"] += drawn.is_stream
    counts["requests_cancelled"] += cancelled
    counts["preemptions"] += len(trace.meta["preemptions"])
    together = trace.store.heads and drawn.settings["interventions"] and trace.meta["preemptions"]
    counts["episodes with all together"] += bool(together)


def differing(subject: Subject, is_verified: bool, batches: Sequence[int], num_prompts: int) -> tuple[int, int]:
    """Decodes the same greedy requests in batches of several sizes; returns how many requests have other tokens, and
    how many other log-probabilities, in another batch."""
    sampling = cp.SamplingParams(temperature=0.0, max_new_tokens=16, stop_token_ids=())
    requests = [cp.Request(draw_request(subject, n).prompt, sampling) for n in range(num_prompts)]
    settings: dict[str, Any] = dict(deterministic=is_verified, capture=None, progress=False, **subject.settings)
    traces = [cp.run(subject.model, requests, **settings, max_batch=size) for size in batches]
    tokens = [len({tuple(trace.committed(i)) for trace in traces}) > 1 for i in range(num_prompts)]
    nats = [len({tuple(trace.logprobs(i)) for trace in traces}) > 1 for i in range(num_prompts)]
    return sum(tokens), sum(nats)


def negative_control(subjects: Iterable[Subject], batches: Sequence[int], num_prompts: int) -> dict[str, Any]:
    """Runs traffic of subjects without verification until the tokens of one differ between batch sizes, then runs that
    one verified. The result is void if none differs without verification; nothing may differ with it.

    Which differs depends on the libraries: with ONEDNN_MAX_CPU_ISA=AVX2 products in 16 bits are batch-invariant.
    """
    for subject in subjects:
        unverified, _ = differing(subject, False, batches, num_prompts)
        if unverified:
            _, verified = in_accepted_shape(subject, {}, lambda shape: differing(shape, True, batches, num_prompts))
            return {
                "control_traffic": subject.key,
                "control_sequences": num_prompts,
                "control_unverified_differ": unverified,
                "control_verified_differ": max(verified),
            }
    return {"control_traffic": "none", "control_unverified_differ": 0, "control_verified_differ": 0}


def control_subjects(has_real: bool) -> list[Subject]:
    """Returns SmolLM2 in bfloat16 and float32, and models with random weights in which pairs of tokens nearly tie."""
    real = real_subjects()[0]
    return [*([real, replace(real, dtype="float32")] if has_real else []), *near_tie_subjects()]


def stress(
    num_tokens: int, seed: int, has_real: bool, report: Callable[[Tally], None] = lambda tally: None
) -> dict[str, Any]:
    """Runs episodes of every subject in turn until `num_tokens` tokens were compared, then the negative control.
    Returns the figures; `has_passed` says whether nothing differed, and the control did without verification."""
    began, tally = time.monotonic(), Tally()
    subjects = [*tiny_subjects(), *near_tie_subjects(), *(real_subjects() if has_real else [])]
    with checked_states():
        for episode in count():
            subject = subjects[episode % len(subjects)]
            one_episode(subject, tally, [seed, episode], most_requests=3 if subject.is_real else 8)
            report(tally)
            if tally.compared.total() >= num_tokens:
                break
    control = negative_control(control_subjects(has_real), batches=(13, 3, 1), num_prompts=13)
    facts = numeric_settings()
    return {
        "processor": processor_name(),
        **{name: facts[name] for name in ("threads", "torch", "cpu_capability")},
        "compared_tokens": tally.compared.total(),
        "real_model_compared_tokens": sum(n for name, n in tally.compared.items() if name.startswith(REAL)),
        "models": len({name.split()[0] for name in tally.compared}),
        **dict(sorted(tally.counts.items())),
        "shapes_refused_by_trial": len(tally.refused),
        "refused_shapes": tally.refused,
        "differences": len(tally.differences),
        "first_differences": tally.differences[:10],
        **control,
        "seconds": round(time.monotonic() - began),
        "has_passed": not tally.differences
        and control["control_unverified_differ"] > 0 == control["control_verified_differ"],
    }
