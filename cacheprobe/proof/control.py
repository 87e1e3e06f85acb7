"""The negative control: unverified, the real model's output must depend on the batch, or nothing was proven."""

from collections.abc import Sequence
from typing import Any

from cacheprobe.api import run
from cacheprobe.observe.trace import Trace
from cacheprobe.progress import Progress
from cacheprobe.proof.subjects import Subject
from cacheprobe.proof.traffic import draw_request
from cacheprobe.records import Request, SamplingParams

NUM_PROMPTS, NEW_TOKENS = 13, 24
BATCHES = (13, 3, 1)
"""Requests in flight."""


def negative_control(subject: Subject, progress: bool = False) -> dict[str, int]:
    """Greedy decoding of the same prompts in batches of three sizes, unverified and verified.

    Returns how many sequences differ between the sizes: `control_unverified_differ` must be above 0, and
    `control_verified_differ` 0.
    """
    sampling = SamplingParams(temperature=0.0, max_new_tokens=NEW_TOKENS, stop_token_ids=())
    requests = [Request(draw_request(subject, n).prompt, sampling) for n in range(NUM_PROMPTS)]
    with Progress(2 * len(BATCHES), "negative control", "runs", enabled=progress) as bar:
        unverified, verified = (_num_differing(subject, requests, is_verified, bar) for is_verified in (False, True))
    return {
        "control_sequences": NUM_PROMPTS,
        "control_unverified_differ": unverified,
        "control_verified_differ": verified,
    }


def _num_differing(subject: Subject, requests: Sequence[Request], verified: bool, bar: Progress) -> int:
    settings: dict[str, Any] = dict(**subject.settings, deterministic=verified, capture=None, progress=False)
    traces: list[Trace] = []
    for size in BATCHES:
        traces.append(run(subject.model, requests, **settings, max_batch=size))
        bar.advance()
    said = [[tuple(trace.committed(i)) for i in range(len(requests))] for trace in traces]
    return sum(len({tokens[i] for tokens in said}) > 1 for i in range(len(requests)))
