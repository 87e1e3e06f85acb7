"""Runs the cells of a sweep in processes of this machine, each with its own model. Replaces a process that dies."""

import json
import os
import selectors
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from typing import IO

from cacheprobe.core.registry import register
from cacheprobe.sweeps.cells import Cell, ModelKey
from cacheprobe.sweeps.events import Event
from cacheprobe.sweeps.workers.holder import Job, JobOutcome
from cacheprobe.sweeps.workers.queue import Waiting

DIED = "worker died"
"""Cause in the JobOutcome of a cell whose worker died."""


class _Worker:
    """Runs cells (runs of a sweep) in one child process, one cell at a time."""

    def __init__(self, name: str, job: Job) -> None:
        self.name = name
        self.cell: Cell | None = None
        self.model_key: ModelKey | None = None
        """Key of the model that the process has loaded."""
        self._error_output: IO[bytes] = tempfile.TemporaryFile()
        threads = str(job.threads)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cacheprobe.sweeps.workers.worker", job.url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._error_output,
            # a worker that waits for its threads should not use a core that another worker needs
            env={
                "OMP_WAIT_POLICY": "PASSIVE",
                **os.environ,
                "OMP_NUM_THREADS": threads,
                "MKL_NUM_THREADS": threads,
                "PYTHONPATH": _path(),
            },
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.requests, self.answers = self.process.stdin, self.process.stdout

    def give(self, cell: Cell) -> bool:
        """Sends a cell to the process. Returns False if the pipe is broken, because the process has ended."""
        self.cell, self.model_key = cell, cell.model_key
        try:
            self.requests.write(json.dumps(cell.to_json()).encode() + b"\n")
            self.requests.flush()
        except BrokenPipeError:
            return False
        return True

    def answer(self) -> JobOutcome | None:
        """Waits for the end of the cell, and returns its JobOutcome; None if the process has ended."""
        line = self.answers.readline()
        return JobOutcome(**json.loads(line)) if line.endswith(b"\n") else None

    def reason_of_end(self) -> str:
        """Waits for the end of the process. Returns text: its signal or exit code, and the end of its error output."""
        code = self.process.wait()
        self._error_output.seek(max(self._error_output.seek(0, os.SEEK_END) - 600, 0))  # the last 600 bytes
        output = " ".join(self._error_output.read().decode("utf-8", "replace").split())
        return (f"signal {-code}" if code < 0 else f"exit code {code}") + (f": {output}" if output else "")

    def end(self) -> None:
        """Kills the process and closes its pipes."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.requests, self.answers, self._error_output):
            try:
                pipe.close()
            except BrokenPipeError:
                pass


@register("sweeps.backends", "processes")
def processes(waiting: Waiting, job: Job) -> Iterator[Event]:
    """Runs the waiting cells (runs) in child processes; yields an Event when a cell starts or ends, or a process dies.

    Every process ends when the generator is exhausted or closed.
    """
    workers = [_Worker(str(i), job) for i in range(min(job.workers, len(waiting)))]
    deaths: Counter[str] = Counter()
    with selectors.DefaultSelector() as ready:
        try:
            for worker in workers:
                ready.register(worker.answers, selectors.EVENT_READ, worker)
                yield from _give_next_cell(worker, waiting)
            while any(worker.cell is not None for worker in workers):
                for key, _ in ready.select():
                    worker: _Worker = key.data
                    cell, outcome = worker.cell, worker.answer()
                    if outcome is None:
                        ready.unregister(key.fileobj)
                        yield from _report_dead_worker(worker, waiting, job, deaths)
                        workers.remove(worker)
                        if not len(waiting) or waiting.is_stopped:
                            continue
                        worker = _Worker(worker.name, job)
                        workers.append(worker)
                        ready.register(worker.answers, selectors.EVENT_READ, worker)
                    elif cell is not None:
                        worker.cell = None
                        yield Event("ended", cell.digest, worker=worker.name, outcome=outcome)
                    yield from _give_next_cell(worker, waiting)
        finally:
            for worker in workers:
                worker.end()


def _give_next_cell(worker: _Worker, waiting: Waiting) -> Iterator[Event]:
    """Sends the next waiting cell, if there is one, to the worker's process, and yields the Event."""
    if (cell := waiting.take(worker.model_key)) is not None:
        worker.give(cell)  # a dead process is noticed when its answer is read
        yield Event("started", cell.digest, worker=worker.name)


def _report_dead_worker(worker: _Worker, waiting: Waiting, job: Job, deaths: Counter[str]) -> Iterator[Event]:
    """Yields the Events of a dead worker process: its death and, if the retries are used up, the failure of its cell.
    Otherwise puts the cell back into the queue."""
    cell, words = worker.cell, worker.reason_of_end()
    worker.cell = None
    worker.end()
    yield Event("worker_died", cell.digest if cell else "", worker=worker.name, message=words)
    if cell is None:
        return
    deaths[cell.digest] += 1
    if deaths[cell.digest] <= job.retries:
        waiting.put_back(cell)
    else:
        outcome = JobOutcome(cell.digest, DIED, f"{deaths[cell.digest]} times, the last by {words}")
        yield Event("ended", cell.digest, worker=worker.name, outcome=outcome)


def _path() -> str:
    """Returns a value of PYTHONPATH with which a worker imports the same modules as this process."""
    return os.pathsep.join(filter(None, sys.path))
