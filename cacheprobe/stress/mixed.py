"""Runs episodes (one run of random requests each) that mix head capture, preemptions, interventions, streams and
cancellations, and checks each with `cp.verify`.

Interventions and patterns change the schedule, so the stored outputs of the pool's requests do not apply. Instead
`cp.verify` computes each request again with the same interventions, and compares tokens, log-probabilities, states,
heads and readings. A cancelled request is compared up to its last committed token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from cacheprobe.api import run, stream, verify
from cacheprobe.core.config import CaptureConfig
from cacheprobe.core.hook_names import ATTENTION_SITES, PATTERN
from cacheprobe.core.records import Request
from cacheprobe.core.values import JsonDict
from cacheprobe.edits.interventions.base import Intervention
from cacheprobe.edits.interventions.make import add, zero
from cacheprobe.stress.refusals import run_in_accepted_shape
from cacheprobe.stress.subjects import Subject
from cacheprobe.stress.tally import Tally
from cacheprobe.stress.traffic import draw_drafter, draw_request, slots_needed
from cacheprobe.trace.trace import Trace

MOST_REQUESTS = {"tiny": 5, "near_ties": 5, "real": 3}
_LONGEST = {"tiny": 24, "near_ties": 24, "real": 10}
"""Largest number of new tokens of a request, by kind of subject: `cp.verify` computes all of them again."""
_FIRST_NUMBER = 2**32
"""Request numbers of mixed episodes start at this number, so that none of them is in the pool."""


@dataclass(frozen=True)
class Mixed:
    """Holds the random choices of one mixed episode: requests, settings, interventions, and which requests of a stream
    are cancelled."""

    requests: tuple[Request, ...]
    settings: JsonDict
    interventions: tuple[Intervention, ...]
    is_stream: bool
    cancelled: dict[int, int]
    """By request index: the number of stream pieces after which the request is cancelled."""
    num_abandoned: int
    """Number of pieces taken from a stream that is closed before the compared run begins; 0 for no such stream."""


def draw_mixed(subject: Subject, seed: Sequence[int]) -> Mixed:
    """Returns the random choices of one mixed episode as a Mixed, fixed by the subject and the seed: requests,
    settings, interventions, streams and cancellations."""
    rng = np.random.default_rng(list(seed))
    requests = []
    for _ in range(int(rng.integers(2, MOST_REQUESTS[subject.kind] + 1))):
        request = draw_request(subject, _FIRST_NUMBER + int(rng.integers(2**31)))
        assert request.sampling is not None
        sampling = replace(request.sampling, max_new_tokens=int(rng.integers(2, _LONGEST[subject.kind] + 1)))
        is_deterministic = not requests or bool(rng.random() < 0.8)
        arrival = int(rng.integers(0, 20)) if rng.random() < 0.3 else 0
        requests.append(replace(request, sampling=sampling, is_deterministic=is_deterministic, arrival_step=arrival))
    heads = [site for site in ATTENTION_SITES if rng.random() < (0.3 if site == PATTERN else 0.5)] or ["z"]
    needed = max(slots_needed(request, subject.window) for request in requests)
    settings: JsonDict = {
        "capture": CaptureConfig(sites=str(rng.choice(["STCZ", "SZ", "S", "TC"])), heads=tuple(heads)),
        "layers": subject.captured_layers,
        "max_kv_tokens": needed + int(rng.integers(0, 12)) if rng.random() < 0.8 else None,
        "drafter": draw_drafter(subject, rng),
    }
    is_stream = bool(rng.random() < 0.6)
    to_cancel = [i for i in range(1, len(requests)) if is_stream and rng.random() < 0.4]  # request 0 is never cancelled
    return Mixed(
        tuple(requests),
        settings,
        tuple(_draw_interventions(subject, requests, rng)),
        is_stream,
        cancelled={i: int(rng.integers(1, 12)) for i in to_cancel},  # after so many pieces of the stream
        num_abandoned=int(rng.integers(1, 6)) if rng.random() < 0.3 else 0,
    )


def _draw_interventions(subject: Subject, requests: Sequence[Request], rng: np.random.Generator) -> list[Intervention]:
    """Returns a list with at most one intervention for each request: at one prompt position, or at every position."""
    made = []
    for number, request in enumerate(requests):
        if rng.random() < 0.7:
            continue
        where: JsonDict = {
            "request_id": number,
            "site": str(rng.choice(["S", "T", "C", "pre"])),
            "layer": int(rng.integers(subject.model.n_layers)),
            "positions": None if rng.random() < 0.5 else int(rng.integers(len(request.prompt))),
            "own_fingerprint": True,
        }
        vector = torch.from_numpy(rng.standard_normal(subject.model.d_model) * 0.1).float()
        is_zero = where["site"] in "TC" and rng.random() < 0.5
        made.append(zero(**where) if is_zero else add(vector, **where))
    return made


def mixed_episode(subject: Subject, tally: Tally, seed: Sequence[int]) -> None:
    """Runs a mixed episode (requests, interventions, perhaps a stream with cancellations), checks the trace with
    `cp.verify`, and adds differences and counts to `tally`.

    If a run refuses the subject's shape because the shape is not batch-invariant, the same requests run in another
    shape. If a request ends with an error, the error is a difference, and `cp.verify` is not called.
    """

    def compute(shape: Subject) -> tuple[Mixed, Trace]:
        """Draws and runs the episode in this shape; returns (the random choices as a Mixed, the trace)."""
        drawn = draw_mixed(shape, seed)
        if drawn.num_abandoned:
            _abandon(shape, drawn)
        return drawn, _run(shape, drawn)

    subject, (drawn, trace) = run_in_accepted_shape(subject, tally.refused, compute)
    where = f"{subject.key}, mixed episode {tally.episodes}"
    for request_id, error in trace.meta["errors"].items():
        tally.differences.append(f"{where}: request {request_id} ended with {error}")
    if not trace.meta["errors"]:
        result = verify(trace, subject.model, progress=False)
        if result.first_difference is not None:
            tally.differences.append(f"{where}: {result.first_difference}")
        tally.compared[subject.key] += result.num_tokens
        tally.counts["mixed_tokens"] += result.num_tokens
        tally.counts["mixed_states_and_heads_compared"] += result.num_states
        tally.counts["mixed_readings_compared"] += result.num_readings
    tally.episodes += 1
    tally.episodes_of[subject.traffic_key] += 1
    _count(tally, trace, drawn)


def _run(subject: Subject, drawn: Mixed) -> Trace:
    settings = {**subject.settings, **drawn.settings, "interventions": drawn.interventions}
    if not drawn.is_stream:
        return run(subject.model, drawn.requests, **settings, progress=False)
    pieces = stream(subject.model, drawn.requests, **settings)
    for number, _ in enumerate(pieces, 1):
        for request_id, after in drawn.cancelled.items():
            if number == after:
                pieces.cancel(request_id)
    return pieces.trace()


def _abandon(subject: Subject, drawn: Mixed) -> None:
    """Starts a stream of the same requests, and closes it after `drawn.num_abandoned` pieces."""
    settings = {**subject.settings, **drawn.settings, "interventions": drawn.interventions}
    pieces = stream(subject.model, drawn.requests, **settings)
    for _ in zip(range(drawn.num_abandoned), pieces, strict=False):
        pass
    pieces.close()


def _count(tally: Tally, trace: Trace, drawn: Mixed) -> None:
    cancelled = sum(reason == "cancelled" for reason in trace.meta["finish"].values())
    preemptions = len(trace.meta["preemptions"])
    tally.counts["mixed_episodes"] += 1
    for site in trace.store.heads:
        tally.counts[f"mixed_episodes_with_{site}"] += 1
    tally.counts["mixed_interventions"] += len(drawn.interventions)
    tally.counts["mixed_streams"] += drawn.is_stream
    tally.counts["mixed_streams_abandoned"] += bool(drawn.num_abandoned)
    tally.counts["mixed_requests_cancelled"] += cancelled
    tally.counts["mixed_preemptions"] += preemptions
    is_all = bool(trace.store.heads and drawn.interventions and preemptions and cancelled)
    tally.counts["mixed_episodes_with_all_together"] += is_all
