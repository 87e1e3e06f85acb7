"""Looks for edits which flip a verdict in a background process, one search at a time.

The process is `python -m cacheprobe.views.dashboard.flip_process`. It reads one line of JSON from stdin: run
(directory), request, step, model (a name or directory; null for the run's own). It writes lines of JSON to stdout: says
(what it does now), or done and total (numbers of edits), and at the end table and meta of the result, or error. It ends
when stdin is closed, so that it does not outlive the dashboard.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from tempfile import TemporaryFile
from threading import Lock, Thread
from typing import TYPE_CHECKING, TextIO

import pandas as pd

from cacheprobe.core.values import JsonDict

if TYPE_CHECKING:
    from cacheprobe.analysis.flips import Flips

WORKER = (sys.executable, "-P", "-m", "cacheprobe.views.dashboard.flip_process")
"""-P: modules of the current directory are not imported."""
MOST_KEPT = 16
"""Number of finished jobs that are kept."""


@dataclass
class FlipJob:
    """Holds a background process and what it has written so far."""

    question: JsonDict
    """As the process reads it."""
    process: "subprocess.Popen[str] | None" = field(default=None, repr=False)
    says: str = "starting"
    done: int = 0
    total: int = 0
    table: pd.DataFrame | None = None
    meta: JsonDict = field(default_factory=dict)
    error: str = ""
    is_cancelled: bool = False

    @property
    def is_running(self) -> bool:
        """Whether the process has neither ended with a result or an error nor been cancelled."""
        return self.table is None and not self.error and not self.is_cancelled

    def start(self) -> None:
        """Starts the process, and a thread that reads its output. Keeps the reason if it cannot be started."""
        errors = TemporaryFile("w+", errors="replace")
        try:
            self.process = subprocess.Popen(
                WORKER, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
            )
        except OSError as error:
            self.error = f"the background process cannot be started: {error}; {self._remedy}"
            return
        Thread(target=self._read, args=(self.process, errors), daemon=True).start()

    @property
    def _remedy(self) -> str:
        asked = self.question
        return f"run `cacheprobe flip {asked['run']} --request {asked['request']} --step {asked['step']}` in a terminal"

    def cancel(self) -> None:
        """Ends the process, if it runs."""
        if self.is_running:
            self.is_cancelled = True
            if self.process is not None:
                self.process.kill()

    def _read(self, process: "subprocess.Popen[str]", errors: TextIO) -> None:
        """Sends the question, and keeps what the process writes until it ends. Keeps the reason if it fails."""
        assert process.stdin is not None and process.stdout is not None
        broken = ""
        with suppress(OSError), process:  # closing its stdin fails if it ended before it read the question
            try:
                process.stdin.write(json.dumps(self.question) + "\n")
                process.stdin.flush()
                for line in process.stdout:
                    self._take(json.loads(line))
            except (OSError, ValueError) as error:  # a broken pipe, or a line that is no JSON
                broken = str(error)
                process.kill()
            process.wait()
        code = process.wait()
        with errors:
            errors.seek(0)
            *_, last = "", broken, *(line.strip() for line in errors if line.strip())
        if self.is_running:
            memory = "; code -9 mostly means too little memory" if code == -9 and not broken else ""
            reason = f": {last}" if last else ""
            self.error = f"the background process ended with code {code} and no result{reason}{memory}; {self._remedy}"

    def _take(self, told: JsonDict) -> None:
        """Keeps the content of one line of the process."""
        if "table" in told:
            self.meta, self.table = told["meta"], pd.DataFrame(**told["table"])
        self.says, self.error = told.get("says", self.says), told.get("error", self.error)
        if "total" in told:
            self.says, self.done, self.total = "editing states", told["done"], told["total"]


class FlipJobs:
    """Keeps jobs by key. Only one runs at a time: a new one cancels the one before, because each holds a model."""

    def __init__(self) -> None:
        self._jobs: dict[Hashable, FlipJob] = {}
        self._lock = Lock()

    def start(self, key: Hashable, question: JsonDict) -> FlipJob:
        """Returns the job of this key, which runs or has its result; starts it if there is none, or after an error or a
        cancellation."""
        with self._lock:
            job = self._jobs.get(key)
            if job is not None and (job.is_running or job.table is not None):
                return job
            for other in self._jobs.values():
                other.cancel()
            job = self._jobs[key] = FlipJob(question)
            while len(self._jobs) > MOST_KEPT:
                self._jobs.pop(next(iter(self._jobs)))
            job.start()
            return job

    def look(self, key: Hashable) -> FlipJob | None:
        """Returns the job of this key; None if there is none."""
        return self._jobs.get(key)


def main() -> None:
    """Answers the question on stdin, as the module's docstring says."""
    question = json.loads(sys.stdin.readline())
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no answer
    tell = partial(_tell, answers)
    Thread(target=_end_with_stdin, daemon=True).start()
    try:
        found = _found(question, tell)
        table = json.loads(found.table.to_json(orient="split", index=False, double_precision=15))
        tell(table={name: table[name] for name in ("columns", "data")}, meta=found.meta)
    except (ValueError, KeyError, OSError, RuntimeError, ImportError) as error:
        tell(error=str(error.args[0] if isinstance(error, KeyError) and error.args else error))


def _tell(answers: TextIO, **what: object) -> None:
    """Writes one line of JSON."""
    print(json.dumps(what), file=answers, flush=True)


def _found(question: JsonDict, tell: Callable[..., None]) -> "Flips":
    """Loads the run and its model, and returns the result of `cp.analysis.flip`."""
    tell(says="opening the run")
    from cacheprobe.analysis.flips import flip, rejection_of, require_reproducible
    from cacheprobe.models.loaders import model_of_run
    from cacheprobe.trace.trace import load_trace

    trace = load_trace(question["run"])
    request, step = question["request"], question["step"]
    require_reproducible(trace, rejection_of(trace, request, step))  # before the model is loaded
    tell(says="loading the model")
    model = model_of_run(trace.fingerprint, question["model"], progress=False)
    tell(says="reading the text")
    return flip(trace, request, step, model=model, progress=lambda done, total: tell(done=done, total=total))


def _end_with_stdin() -> None:
    """Ends the process as soon as stdin is closed: the dashboard has ended, or has no more use for the result."""
    while os.read(sys.stdin.fileno(), 4096):  # not sys.stdin.read, whose lock Python waits for at its end
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
