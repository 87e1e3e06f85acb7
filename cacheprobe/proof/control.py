"""The negative control: unverified, the real model's output must depend on the batch, or nothing was proven."""

from collections.abc import Sequence

from cacheprobe.api import run
from cacheprobe.models.base import CachedLM
from cacheprobe.observe.trace import Trace
from cacheprobe.proof.subjects import Subject
from cacheprobe.proof.traffic import draw_request
from cacheprobe.records import Request, SamplingParams

NUM_PROMPTS, NEW_TOKENS = 13, 24
BATCHES = (13, 3, 1)
"""Requests in flight."""


def negative_control(subject: Subject) -> dict[str, int]:
    """Greedy decoding of the same prompts in batches of three sizes, unverified and verified.

    Returns how many sequences differ between the sizes: `control_unverified_differ` must be above 0, and
    `control_verified_differ` 0.
    """
    sampling = SamplingParams(temperature=0.0, max_new_tokens=NEW_TOKENS, stop_token_ids=())
    requests = [Request(draw_request(subject, n).prompt, sampling) for n in range(NUM_PROMPTS)]
    return {
        "control_sequences": NUM_PROMPTS,
        "control_unverified_differ": _num_differing(subject.model, requests, False, subject.settings),
        "control_verified_differ": _num_differing(subject.model, requests, True, subject.settings),
    }


def _num_differing(model: CachedLM, requests: Sequence[Request], verified: bool, settings: dict[str, int]) -> int:
    traces: list[Trace] = [
        run(model, requests, **settings, deterministic=verified, max_batch=size, capture=None, progress=False)
        for size in BATCHES
    ]
    said = [[tuple(trace.committed(i)) for i in range(len(requests))] for trace in traces]
    return sum(len({tokens[i] for tokens in said}) > 1 for i in range(len(requests)))
