"""Runs the cells (runs) of a sweep on a Ray cluster, with one loaded model in each actor.

Ray retries the cell of an actor as long as it may restart the actor, so only the number of restarts is limited. A limit
on retries would not work: until Ray knows that a node is lost, it reports the node's actors as unavailable, and would
use up the retries within seconds.
"""

import math
import os
import socket
import time
from collections.abc import Hashable, Iterator
from types import ModuleType
from typing import Any

from cacheprobe.core.registry import register
from cacheprobe.sweeps.backends.processes import DIED
from cacheprobe.sweeps.cells import Cell, ModelKey
from cacheprobe.sweeps.events import Event
from cacheprobe.sweeps.workers.holder import Holder, Job, JobOutcome
from cacheprobe.sweeps.workers.queue import Waiting

SECONDS_BETWEEN_LOOKS = 1.0
"""Seconds between two checks of the cluster; short enough that Ctrl-C is noticed."""
SECONDS_WITHOUT_HEAD = 20.0
"""Longest time in seconds without a head node. After 60 s, Ray itself would end the program without a report."""

SECONDS_TO_CONNECT = 5.0
TRIES_VARIABLE, TRIES_TO_JOIN = "RAY_gcs_server_port_wait_time_s", 2
"""Variable of Ray for the number of tries to join a cluster, and its value here. Ray's default is twenty, without a
message. A try takes forty seconds if the address accepts connections but never answers."""


class _Watch:
    """Checks whether a Ray cluster still answers, and raises ConnectionError if it does not for SECONDS_WITHOUT_HEAD
    (20 s). Without this check, Ray would end the program itself after 60 s, without a report."""

    def __init__(self, ray: ModuleType) -> None:
        self._ray = ray
        self.address: str = ray.get_runtime_context().gcs_address
        self._seen = self._looked = time.monotonic()
        self._answers = True

    def look(self) -> bool:
        """Returns True if the head node answered at the newest check, which is at most about SECONDS_BETWEEN_LOOKS old.
        Raises: ConnectionError if the cluster is lost for SECONDS_WITHOUT_HEAD."""
        if time.monotonic() - self._looked > SECONDS_BETWEEN_LOOKS:
            self._answers = self._is_there()
            self._looked = time.monotonic()
        return self._answers

    def wait(self) -> None:
        """Waits until the head node answers. Raises: ConnectionError as `look` does."""
        self._looked = -math.inf
        while not self.look():
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def _is_there(self) -> bool:
        """Checks the cluster now; returns True if the head node answers. Raises: ConnectionError as `look` does."""
        if why := _connection_error(self.address, SECONDS_BETWEEN_LOOKS):
            self._give_up_after_a_while(f"the head node of the Ray cluster at {self.address} has gone ({why})")
            return False
        if any(node["Alive"] for node in self._ray.nodes()):
            self._seen = time.monotonic()
        else:
            self._give_up_after_a_while(f"no node of the Ray cluster at {self.address} is left")
        return True

    def _give_up_after_a_while(self, why: str) -> None:
        """Raises: ConnectionError if the last good check was more than SECONDS_WITHOUT_HEAD seconds ago."""
        if time.monotonic() - self._seen > SECONDS_WITHOUT_HEAD:
            raise ConnectionError(f"{why}; start one again")


class _RayWorker:
    """Runs cells (runs of a sweep) on one Ray actor at a time. Another model needs a new actor."""

    def __init__(self, name: str, job: Job, watch: _Watch) -> None:
        self.name, self.job, self._watch = name, job, watch
        self.cell: Cell | None = None
        self.actor: Any = None  # Ray's actor handles have no useful type
        self.model_key: ModelKey | None = None
        """Key of the model that the actor has loaded."""
        self.answered = 0
        """Number of cells that the actor has finished."""

    def give(self, cell: Cell) -> Hashable:
        """Starts the cell on the actor, or on a new actor if needed. Returns Ray's reference to the JobOutcome."""
        import ray

        if self.model_key != cell.model_key:
            self.end()
        if self.actor is None:
            self._watch.wait()
            job = self.job
            remote = ray.remote(
                num_cpus=job.num_cpus, num_gpus=job.num_gpus, max_restarts=job.retries, max_task_retries=-1
            )(Holder)
            self.actor = remote.remote(job.url)
        self.cell, self.model_key = cell, cell.model_key
        return self.actor.run.remote(cell.to_json())

    def end(self) -> None:
        """Ends the actor, if there is one."""
        import ray

        if self.actor is not None:
            ray.kill(self.actor)
        self.actor = self.model_key = None
        self.answered = 0


@register("sweeps.backends", "ray")
def on_ray(waiting: Waiting, job: Job) -> Iterator[Event]:
    """Runs the waiting cells (runs) on a Ray cluster. Yields an Event when a cell starts or ends, or when an actor dies
    and may not be restarted.

    Joins the cluster at `job.address`, or starts one on this machine and stops it at the end. The results must be in a
    place to which every node can write: a shared folder, or an object store.
    Raises: ValueError without Ray, ConnectionError if no cluster answers at the address, or if the cluster is lost.
    """
    try:
        import ray
        from ray.exceptions import RayError
    except ModuleNotFoundError:
        raise ValueError(
            "this backend needs Ray: pip install 'cacheprobe[sweep]'; or use --backend processes"
        ) from None
    joined_here = not ray.is_initialized()
    if joined_here:
        _join(ray, job)
    watch = _Watch(ray)
    workers = [_RayWorker(str(i), job, watch) for i in range(min(job.workers, len(waiting)))]
    running: dict[Hashable, _RayWorker] = {}
    given_back: set[str] = set()
    try:
        for worker in workers:
            yield from _give_next_cell(worker, waiting, running)
        while running:
            ready, _ = ray.wait(list(running), timeout=SECONDS_BETWEEN_LOOKS)
            watch.look()
            for reference in ready:
                worker = running.pop(reference)
                assert worker.cell is not None
                try:
                    outcome = ray.get(reference)
                    worker.answered += 1
                except RayError as error:  # Ray has used up the actor's restarts
                    yield from _report_lost_actor(worker, waiting, error, given_back)
                else:
                    yield Event("ended", worker.cell.digest, worker=worker.name, outcome=outcome)
                yield from _give_next_cell(worker, waiting, running)
    finally:
        for worker in workers:
            worker.end()
        if joined_here:
            ray.shutdown()


def _report_lost_actor(worker: _RayWorker, waiting: Waiting, error: Exception, given_back: set[str]) -> Iterator[Event]:
    """Yields the Events of a lost actor: its death, and the end of its cell. The cell may be put back into the queue
    instead."""
    cell, lines = worker.cell, [line.strip() for line in str(error).strip().splitlines()]
    assert cell is not None
    words = " ".join(dict.fromkeys((lines[0], lines[-1])))[:500]  # the reason is in the last line of Ray's message
    yield Event("worker_died", cell.digest, worker=worker.name, message=words)
    if worker.answered and worker.job.retries and cell.digest not in given_back:
        given_back.add(cell.digest)
        waiting.put_back(cell)
    else:
        outcome = JobOutcome(cell.digest, DIED, f"{type(error).__name__}: {words}")
        yield Event("ended", cell.digest, worker=worker.name, outcome=outcome)
    worker.end()


def _give_next_cell(worker: _RayWorker, waiting: Waiting, running: dict[Hashable, _RayWorker]) -> Iterator[Event]:
    """Starts the next waiting cell on the worker's actor, and yields the Event; without such a cell, ends the actor."""
    if (cell := waiting.take(worker.model_key)) is None:
        worker.end()  # frees its resources for other workers
        return
    running[worker.give(cell)] = worker
    yield Event("started", cell.digest, worker=worker.name)


def _join(ray: ModuleType, job: Job) -> None:
    """Joins the Ray cluster at `job.address`; without an address, starts a cluster on this machine. Raises:
    ConnectionError if the cluster cannot be joined."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options = dict(log_to_driver=False, logging_level="error")
    if job.address is not None:
        if why := _connection_error(job.address, SECONDS_TO_CONNECT):
            raise ConnectionError(
                f"no head node of a Ray cluster answers at {job.address} ({why}); start one, or look at the address"
            )
        old_value = os.environ.get(TRIES_VARIABLE)
        os.environ.setdefault(TRIES_VARIABLE, str(TRIES_TO_JOIN))
        try:
            ray.init(address=job.address, **options)
        except (ConnectionError, RuntimeError) as error:
            raise ConnectionError(f"the Ray cluster at {job.address} could not be joined: {error}") from error
        finally:  # a head node that is started later would read the variable as seconds
            if old_value is None:
                os.environ.pop(TRIES_VARIABLE, None)
    else:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # actors that wait should not burn a core another needs
        cpus = max(os.cpu_count() or 1, int(job.num_cpus * job.workers + 0.999))
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, **options)


def _connection_error(address: str, seconds: float) -> str:
    """Returns the error of a connection to `address` as text; '' if the connection succeeds within `seconds`, or if
    `address` is not HOST:PORT (not tried)."""
    host, _, port = address.rpartition(":")
    if "/" in address or not port.isdigit():  # "auto", ray://...: Ray finds the cluster itself
        return ""
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()
    except OSError as error:
        return str(error)
    return ""
