"""The negative control: unverified, the real model's output must depend on the batch, or nothing was proven.

`python -m cacheprobe.proof.control` prints it as JSON, in one thread: so a proof runs it beside its soak.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from cacheprobe.api import run
from cacheprobe.observe.trace import Trace
from cacheprobe.progress import Progress
from cacheprobe.proof.subjects import Subject, real_subjects
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


class ControlError(RuntimeError):
    """The process that runs the negative control has failed."""


class ControlBeside:
    """The negative control of SmolLM2 in a process of its own, on another core than the soak's."""

    def __init__(self, process: subprocess.Popen[str], errors: Any) -> None:
        self._process, self._errors = process, errors

    def result(self) -> dict[str, int]:
        """What `negative_control` returned, and `control_seconds`; waits for it. Raises: ControlError."""
        text, _ = self._process.communicate()
        if self._process.returncode == 0:
            return json.loads(text)
        self._errors.seek(0)
        raise ControlError(
            f"the negative control ended with exit status {self._process.returncode}; its last words:\n"
            f"{self._errors.read()[-2000:]}\nwithout it nothing is proven: mend the cause and call prove again, "
            "which goes on from what was compared"
        )


@contextmanager
def control_beside() -> Iterator[ControlBeside]:
    """Starts the control now; it is ended with the block, also by an error or an interrupt."""
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        command = [sys.executable, "-m", "cacheprobe.proof.control"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=settings)
        try:
            yield ControlBeside(process, errors)
        finally:
            process.kill()
            process.wait()


if __name__ == "__main__":
    began = time.monotonic()
    numbers = negative_control(real_subjects()[0])
    print(json.dumps({**numbers, "control_seconds": round(time.monotonic() - began)}))
