"""Starts, watches and cancels the background process that looks for edits which flip a verdict, one at a time."""

import json
import subprocess
import sys
from collections.abc import Hashable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock, Thread

import pandas as pd

from cacheprobe.core.values import JsonDict

WORKER = (sys.executable, "-P", "-m", "cacheprobe.views.dashboard.flip_worker")
"""-P: modules of the current directory are not imported."""
MOST_KEPT = 16
"""Number of finished jobs that are kept."""


@dataclass
class FlipJob:
    """Holds a background process and what it has written so far."""

    question: JsonDict
    """As `flip_worker` reads it."""
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
        try:
            self.process = subprocess.Popen(
                WORKER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        except OSError as error:
            self.error = f"the background process cannot be started: {error}; {self._remedy}"
            return
        Thread(target=self._read, args=(self.process,), daemon=True).start()

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

    def _read(self, process: "subprocess.Popen[str]") -> None:
        """Sends the question, and keeps what the process writes until it ends. Keeps the reason if it fails."""
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        last, is_cut = [""], False
        errors = Thread(target=_keep_last, args=(process.stderr, last), daemon=True)
        errors.start()
        with suppress(OSError), process:  # closing its stdin fails if it ended before it read the question
            try:
                process.stdin.write(json.dumps(self.question) + "\n")
                process.stdin.flush()
                for line in process.stdout:
                    self._take(json.loads(line))
            except (OSError, ValueError) as error:  # a broken pipe, or a line that is no JSON
                last[0] = last[0] or str(error)
                is_cut = True
                process.kill()
            process.wait()
            errors.join(1.0)
        code = process.wait()
        if self.is_running:
            memory = "; code -9 mostly means too little memory" if code == -9 and not is_cut else ""
            reason = f": {last[0]}" if last[0] else ""
            self.error = f"the background process ended with code {code} and no result{reason}{memory}; {self._remedy}"

    def _take(self, told: JsonDict) -> None:
        """Keeps the content of one line of the process."""
        if "table" in told:
            self.meta, self.table = told["meta"], pd.DataFrame(**told["table"])
        self.says, self.error = told.get("says", self.says), told.get("error", self.error)
        if "total" in told:
            self.says, self.done, self.total = "editing states", told["done"], told["total"]


def _keep_last(lines: Iterable[str], last: list[str]) -> None:
    """Keeps the newest of `lines` that is not empty in last[0]."""
    for line in lines:
        last[0] = line.strip() or last[0]


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
