"""Computes the expected output of a request with the slow reference (`cp.reference`)."""

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
class ReferenceResult:
    """Holds the output of a request: its tokens, and digests (text) of log-probabilities, states and lens readings.

    The digest of states is '' if no states were captured; that of readings is '' if no lens read.
    """

    tokens: tuple[int, ...]
    logprobs: str
    states: str
    readings: str


def output_of(trace: Trace, request_id: int) -> ReferenceResult:
    """Returns the output of one request in a trace, as a ReferenceResult."""
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
    return ReferenceResult(tuple(trace.committed(request_id)), nats, states, readings)


def reference_answer(subject: Subject, request: Request, capture: str | None, layers: Sequence[int]) -> ReferenceResult:
    """Computes one request alone with the slow reference (`cp.reference`); returns the output as a ReferenceResult."""
    trace = reference(subject.model, [request], **subject.settings, capture=capture, layers=layers, progress=False)
    return output_of(trace, 0)
