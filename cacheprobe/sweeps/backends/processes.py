"""In processes of this machine, each with a model of its own. A process that dies is started again."""

import json
import os
import selectors
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from typing import IO, Any

from cacheprobe.core.registry import register
from cacheprobe.sweeps.cells import Cell
from cacheprobe.sweeps.events import Event
from cacheprobe.sweeps.workers.holder import Job, Outcome
from cacheprobe.sweeps.workers.queue import Waiting

DIED = "worker died"


class _Worker:
    """One process, and what it is at."""

    def __init__(self, name: str, job: Job) -> None:
        self.name = name
        self.cell: Cell | None = None
        self.held: Any = None
        self._said: IO[bytes] = tempfile.TemporaryFile()
        threads = str(job.threads)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cacheprobe.sweeps.workers.worker", job.url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            # workers that wait for their threads should not burn a core that another one needs
            env={
                "OMP_WAIT_POLICY": "PASSIVE",
                **os.environ,
                "OMP_NUM_THREADS": threads,
                "MKL_NUM_THREADS": threads,
                "PYTHONPATH": _path(),
            },
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.asks, self.answers = self.process.stdin, self.process.stdout

    def give(self, cell: Cell) -> bool:
        """Whether the process could be told."""
        self.cell, self.held = cell, cell.model_key
        try:
            self.asks.write(json.dumps(cell.to_json()).encode() + b"\n")
            self.asks.flush()
        except BrokenPipeError:
            return False
        return True

    def answer(self) -> Outcome | None:
        """Its outcome; None where the process is gone."""
        line = self.answers.readline()
        return Outcome(**json.loads(line)) if line.endswith(b"\n") else None

    def last_words(self) -> str:
        """How it ended, and the end of what it said."""
        code = self.process.wait()
        self._said.seek(max(self._said.seek(0, os.SEEK_END) - 600, 0))
        said = " ".join(self._said.read().decode("utf-8", "replace").split())
        return (f"signal {-code}" if code < 0 else f"exit code {code}") + (f": {said}" if said else "")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.asks, self.answers, self._said):
            try:
                pipe.close()
            except BrokenPipeError:
                pass


@register("sweeps.backends", "processes")
def processes(waiting: Waiting, job: Job) -> Iterator[Event]:
    """Yields what happens; on closing it every process is ended."""
    workers = [_Worker(str(i), job) for i in range(min(job.workers, len(waiting)))]
    deaths: Counter[str] = Counter()
    with selectors.DefaultSelector() as ready:
        try:
            for worker in workers:
                ready.register(worker.answers, selectors.EVENT_READ, worker)
                yield from _hand(worker, waiting)
            while any(worker.cell is not None for worker in workers):
                for key, _ in ready.select():
                    worker: _Worker = key.data
                    cell, outcome = worker.cell, worker.answer()
                    if outcome is None:
                        ready.unregister(key.fileobj)
                        yield from _bury(worker, waiting, job, deaths)
                        workers.remove(worker)
                        if not len(waiting) or waiting.is_stopped:
                            continue
                        worker = _Worker(worker.name, job)
                        workers.append(worker)
                        ready.register(worker.answers, selectors.EVENT_READ, worker)
                    elif cell is not None:
                        worker.cell = None
                        yield Event("ended", cell.digest, worker=worker.name, outcome=outcome)
                    yield from _hand(worker, waiting)
        finally:
            for worker in workers:
                worker.end()


def _hand(worker: _Worker, waiting: Waiting) -> Iterator[Event]:
    if (cell := waiting.take(worker.held)) is not None:
        worker.give(cell)  # where it is dead already, its silence says so
        yield Event("started", cell.digest, worker=worker.name)


def _bury(worker: _Worker, waiting: Waiting, job: Job, deaths: Counter[str]) -> Iterator[Event]:
    """Give back the cell of a dead worker, or count it as failed where it has outlived its retries."""
    cell, words = worker.cell, worker.last_words()
    worker.cell = None
    worker.end()
    yield Event("worker_died", cell.digest if cell else "", worker=worker.name, message=words)
    if cell is None:
        return
    deaths[cell.digest] += 1
    if deaths[cell.digest] <= job.retries:
        waiting.put_back(cell)
    else:
        outcome = Outcome(cell.digest, DIED, f"{deaths[cell.digest]} times, the last by {words}")
        yield Event("ended", cell.digest, worker=worker.name, outcome=outcome)


def _path() -> str:
    """So that a worker imports what this process does, from wherever that is."""
    return os.pathsep.join(filter(None, sys.path))
