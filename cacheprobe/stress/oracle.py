"""Computes the oracle's answer to each request, once for each schedule, with `cp.reference`."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from cacheprobe.api import reference
from cacheprobe.core.records import Request
from cacheprobe.stress.subjects import Subject
from cacheprobe.trace.trace import Trace

_READINGS = ["position", "layer", "token_id", "logprob_nats", "entropy_nats", "rank", "committed_logprob_nats"]


@dataclass(frozen=True)
class Answer:
    """Expected output of a request: tokens, and digests of log-probabilities, states and readings.

    The last two are '' if no states were captured.
    """

    tokens: tuple[int, ...]
    logprobs: str
    states: str
    readings: str


def answer_of(trace: Trace, request_id: int) -> Answer:
    """Returns the output of a run for one request."""
    nats = hashlib.sha256(repr(trace.logprobs(request_id)).encode()).hexdigest()[:16]
    states = readings = ""
    if trace.store.sites:
        states = trace.digest(request_id)[:16]
    if trace.hypothesis_table is not None:
        table = trace.hypothesis_table
        rows = table[(table.request_id == request_id) & (table.status == "committed")]
        ordered = rows.sort_values(["position", "layer"])[_READINGS].reset_index(drop=True)
        hashed = pd.util.hash_pandas_object(ordered.astype({"rank": "Int64"}), index=False)
        readings = hashlib.sha256(hashed.to_numpy().tobytes()).hexdigest()[:16]
    return Answer(tuple(trace.committed(request_id)), nats, states, readings)


def ask(subject: Subject, request: Request, capture: str | None, layers: Sequence[int]) -> Answer:
    """Returns the output of the oracle's own run of one request, alone."""
    trace = reference(subject.model, [request], **subject.settings, capture=capture, layers=layers, progress=False)
    return answer_of(trace, 0)
