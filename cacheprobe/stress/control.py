"""Runs the negative control of the stress test: it shows that without verification the output of some traffic depends
on the batch. Without such traffic, a stress test without a difference proves nothing.

Which traffic diverges depends on the libraries. With ONEDNN_MAX_CPU_ISA=AVX2, for example, torch multiplies bfloat16
and float16 matrices with a batch-invariant routine, so only float32 diverges. Therefore several kinds of traffic are
tried.

`python -m cacheprobe.stress.control` prints the result as JSON, computed in one thread. A stress test runs this command
at the same time as its episodes.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import IO

from cacheprobe.api import run
from cacheprobe.core.records import Request, SamplingParams
from cacheprobe.core.values import JsonDict
from cacheprobe.stress.refusals import run_in_accepted_shape
from cacheprobe.stress.subjects import Subject, near_tie_subjects, real_subjects
from cacheprobe.stress.traffic import draw_request
from cacheprobe.trace.trace import Trace

Differing = dict[str, int]
"""Number of requests whose output differs between the batch sizes, by compared output: "tokens", "logprobs"."""


@dataclass(frozen=True)
class Traffic:
    """Holds one kind of traffic for the negative control: a model, and prompts that are decoded greedily in batches of
    several sizes."""

    subject: Subject
    num_prompts: int = 13
    new_tokens: int = 24
    batches: tuple[int, ...] = (13, 3, 1)
    """Numbers of requests in flight at once; each number is one run."""

    def __str__(self) -> str:
        sizes = ", ".join(map(str, self.batches))
        return f"{self.subject.key}: {self.num_prompts} requests of {self.new_tokens} tokens, batches of {sizes}"

    def run(self, subject: Subject, is_verified: bool) -> Differing:
        """Runs the same requests at every batch size, and returns how many requests differ between the sizes, as
        {"tokens": n, "logprobs": n}.

        subject: the subject of this traffic, perhaps in another shape. is_verified: whether the requests are
        deterministic.
        """
        sampling = SamplingParams(temperature=0.0, max_new_tokens=self.new_tokens, stop_token_ids=())
        requests = [Request(draw_request(subject, n).prompt, sampling) for n in range(self.num_prompts)]
        traces = [
            run(
                subject.model, requests, deterministic=is_verified, capture=None, progress=False,
                **subject.settings, max_batch=size,
            )
            for size in self.batches
        ]  # fmt: skip
        return {
            "tokens": _num_differing([[tuple(trace.committed(i)) for trace in traces] for i in range(len(requests))]),
            "logprobs": _num_differing([[tuple(_nats(trace, i)) for trace in traces] for i in range(len(requests))]),
        }


def _nats(trace: Trace, request_id: int) -> list[str]:
    return [float(nats).hex() for nats in trace.logprobs(request_id)]


def _num_differing(outputs: list[list[tuple]]) -> int:
    """Returns the number of requests whose output differs between the batch sizes. outputs: for each request, its
    output at each batch size."""
    return sum(len(set(of_request)) > 1 for of_request in outputs)


def traffic_to_try() -> Iterator[Traffic]:
    """Yields kinds of Traffic for the negative control: SmolLM2 in bfloat16, then in float32, then models with random
    weights in which pairs of tokens nearly tie."""
    real = real_subjects()[0]
    yield Traffic(real)
    yield Traffic(real, num_prompts=40, new_tokens=16, batches=(40, 5))  # products of more than 32 rows
    yield Traffic(replace(real, dtype="float32"))
    yield from map(Traffic, near_tie_subjects())


def negative_control(to_try: Iterable[Traffic]) -> JsonDict:
    """Runs kinds of traffic without verification until the tokens of one kind differ between batch sizes, then runs
    that kind verified. Returns a dict of results, for example how many requests differed.

    `control_traffic` is the kind whose tokens differed ("none" if no kind's did), and `control_sequences` its number of
    requests (if no kind's tokens differed, of all kinds). `control_unverified_differ` of these requests had other
    tokens in another batch: the number must be above 0. `control_verified_differ` is how many had other tokens, or
    other log-probabilities if these are more, although verified: the number must be 0. `control_tried` has the
    unverified differences of every kind that was tried, and `control_refused_shapes` the reason for each refused shape.
    """
    tried: dict[str, Differing] = {}
    refused: dict[str, str] = {}
    figures: JsonDict = {"control_traffic": "none", "control_sequences": 0}
    unverified = verified = 0
    for traffic in to_try:
        tried[str(traffic)] = differing = traffic.run(traffic.subject, is_verified=False)
        figures["control_sequences"] += traffic.num_prompts
        if not differing["tokens"]:
            continue
        shape, checked = run_in_accepted_shape(
            traffic.subject, refused, lambda s, t=traffic: t.run(s, is_verified=True)
        )
        unverified, verified = differing["tokens"], max(checked.values())
        name = str(replace(traffic, subject=shape))
        figures = {"control_traffic": name, "control_sequences": traffic.num_prompts}
        break
    return {
        **figures,
        "control_unverified_differ": unverified,
        "control_verified_differ": verified,
        "control_tried": tried,
        "control_refused_shapes": refused,
    }


class ControlError(RuntimeError):
    """Raised if the process that runs the negative control (traffic without verification) failed."""


class ControlProcess:
    """Holds the process in which the negative control (traffic without verification) runs beside the stress test;
    `result` waits for the process and returns the figures."""

    def __init__(self, process: subprocess.Popen[str], errors: IO[str]) -> None:
        self._process, self._errors = process, errors

    def result(self) -> JsonDict:
        """Waits for the process; returns the dict of `negative_control`, with `control_seconds` added.

        Raises: ControlError if the process failed.
        """
        text, _ = self._process.communicate()
        if self._process.returncode == 0:
            return json.loads(text)
        self._errors.seek(0)
        raise ControlError(
            f"the negative control ended with exit status {self._process.returncode}; its last words:\n"
            f"{self._errors.read()[-2000:]}\nwithout it the result is void: mend the cause and call stress again, "
            "which goes on from what was compared"
        )


@contextmanager
def control_beside() -> Iterator[ControlProcess]:
    """Starts the negative control (traffic without verification) in a process of its own, and yields it as a
    ControlProcess (a context manager). The end of the `with` block kills the process, also after an error or an
    interrupt."""
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        command = [sys.executable, "-m", "cacheprobe.stress.control"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=settings)
        try:
            yield ControlProcess(process, errors)
        finally:
            process.kill()
            process.wait()


if __name__ == "__main__":
    began = time.monotonic()
    numbers = negative_control(traffic_to_try())
    print(json.dumps({**numbers, "control_seconds": round(time.monotonic() - began)}))
