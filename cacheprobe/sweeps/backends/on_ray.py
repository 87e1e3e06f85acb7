"""Runs cells on a Ray cluster: one actor holds one model. Ray places, retries and restarts actors.

A task is retried for as long as its actor may be restarted. A limited number of task retries would not work: before Ray
knows that a node is lost, it calls the node's actors unavailable, and would use up the retries within seconds. So the
number of restarts is limited instead.
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
from cacheprobe.sweeps.workers.holder import Holder, Job, Outcome
from cacheprobe.sweeps.workers.queue import Waiting

SECONDS_BETWEEN_LOOKS = 1.0
"""Seconds between checks; short enough that Ctrl-C is noticed."""
SECONDS_WITHOUT_HEAD = 20.0
"""Longest time without a head node. After 60 s without one, Ray ends the program without a report."""

SECONDS_TO_CONNECT = 5.0
TRIES_VARIABLE, TRIES_TO_JOIN = "RAY_gcs_server_port_wait_time_s", 2
"""Number of tries to join, of forty seconds each if the address accepts connections but never answers. Ray's own number
is twenty, without a message."""


class _Watch:
    """Checks whether the cluster still answers. Ray reports no lost head node; it ends the program."""

    def __init__(self, ray: ModuleType) -> None:
        self._ray = ray
        self.address: str = ray.get_runtime_context().gcs_address
        self._seen = self._looked = time.monotonic()
        self._answers = True

    def look(self) -> bool:
        """Returns whether the head node answers. Raises: ConnectionError if it has not for a while, or no node
        is left.
        """
        if time.monotonic() - self._looked > SECONDS_BETWEEN_LOOKS:
            self._answers = self._is_there()
            self._looked = time.monotonic()
        return self._answers

    def wait(self) -> None:
        """Waits until the head node answers. Without it, Ray's calls (such as a new actor) would not return."""
        self._looked = -math.inf
        while not self.look():
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def _is_there(self) -> bool:
        if why := _connection_error(self.address, SECONDS_BETWEEN_LOOKS):
            self._give_up_after_a_while(f"the head node of the Ray cluster at {self.address} has gone ({why})")
            return False
        if any(node["Alive"] for node in self._ray.nodes()):
            self._seen = time.monotonic()
        else:
            self._give_up_after_a_while(f"no node of the Ray cluster at {self.address} is left")
        return True

    def _give_up_after_a_while(self, why: str) -> None:
        if time.monotonic() - self._seen > SECONDS_WITHOUT_HEAD:
            raise ConnectionError(f"{why}; start one again")


class _Slot:
    """A place for one actor; another model needs a new actor."""

    def __init__(self, name: str, job: Job, watch: _Watch) -> None:
        self.name, self.job, self._watch = name, job, watch
        self.cell: Cell | None = None
        self.actor: Any = None  # Ray's actor handles have no useful type
        self.held: ModelKey | None = None
        self.answered = 0
        """Number of cells that the actor has finished."""

    def give(self, cell: Cell) -> Hashable:
        """Starts the cell on the actor, and returns Ray's reference to the outcome."""
        import ray

        if self.held != cell.model_key:
            self.end()
        if self.actor is None:
            self._watch.wait()
            job = self.job
            remote = ray.remote(
                num_cpus=job.num_cpus, num_gpus=job.num_gpus, max_restarts=job.retries, max_task_retries=-1
            )(Holder)
            self.actor = remote.remote(job.url)
        self.cell, self.held = cell, cell.model_key
        return self.actor.run.remote(cell.to_json())

    def end(self) -> None:
        """Ends the actor."""
        import ray

        if self.actor is not None:
            ray.kill(self.actor)
        self.actor = self.held = None
        self.answered = 0


@register("sweeps.backends", "ray")
def on_ray(waiting: Waiting, job: Job) -> Iterator[Event]:
    """Yields the events of the cells. Joins the cluster of `job.address`, or starts one here and stops it at the end.

    Results must go where every node can write: a shared folder, or an object store.
    Raises: ValueError without Ray, ConnectionError if there is no cluster at the address, or no longer.
    """
    try:
        import ray
        from ray.exceptions import RayError
    except ModuleNotFoundError:
        raise ValueError(
            "this backend needs Ray: pip install 'cacheprobe[sweep]'; or use --backend processes"
        ) from None
    is_mine = not ray.is_initialized()
    if is_mine:
        _join(ray, job)
    watch = _Watch(ray)
    slots = [_Slot(str(i), job, watch) for i in range(min(job.workers, len(waiting)))]
    running: dict[Hashable, _Slot] = {}
    given_back: set[str] = set()
    try:
        for slot in slots:
            yield from _give_next_cell(slot, waiting, running)
        while running:
            ready, _ = ray.wait(list(running), timeout=SECONDS_BETWEEN_LOOKS)
            watch.look()
            for reference in ready:
                slot = running.pop(reference)
                assert slot.cell is not None
                try:
                    outcome = ray.get(reference)
                    slot.answered += 1
                except RayError as error:  # Ray has used up the actor's restarts
                    yield from _report_lost_actor(slot, waiting, error, given_back)
                else:
                    yield Event("ended", slot.cell.digest, worker=slot.name, outcome=outcome)
                yield from _give_next_cell(slot, waiting, running)
    finally:
        for slot in slots:
            slot.end()
        if is_mine:
            ray.shutdown()


def _report_lost_actor(slot: _Slot, waiting: Waiting, error: Exception, given_back: set[str]) -> Iterator[Event]:
    """Reports the cell of a lost actor as failed.

    But if the actor ran other cells before, which may have used up its restarts, the cell is put back into the queue,
    once.
    """
    cell, lines = slot.cell, [line.strip() for line in str(error).strip().splitlines()]
    assert cell is not None
    words = " ".join(dict.fromkeys((lines[0], lines[-1])))[:500]  # Ray says what, where, and at the end why
    yield Event("worker_died", cell.digest, worker=slot.name, message=words)
    if slot.answered and slot.job.retries and cell.digest not in given_back:
        given_back.add(cell.digest)
        waiting.put_back(cell)
    else:
        outcome = Outcome(cell.digest, DIED, f"{type(error).__name__}: {words}")
        yield Event("ended", cell.digest, worker=slot.name, outcome=outcome)
    slot.end()


def _give_next_cell(slot: _Slot, waiting: Waiting, running: dict[Hashable, _Slot]) -> Iterator[Event]:
    if (cell := waiting.take(slot.held)) is None:
        slot.end()  # frees its resources for other slots
        return
    running[slot.give(cell)] = slot
    yield Event("started", cell.digest, worker=slot.name)


def _join(ray: ModuleType, job: Job) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    asked = dict(log_to_driver=False, logging_level="error")
    if job.address is not None:
        if why := _connection_error(job.address, SECONDS_TO_CONNECT):
            raise ConnectionError(
                f"no head node of a Ray cluster answers at {job.address} ({why}); start one, or look at the address"
            )
        given = os.environ.get(TRIES_VARIABLE)
        os.environ.setdefault(TRIES_VARIABLE, str(TRIES_TO_JOIN))
        try:
            ray.init(address=job.address, **asked)
        except (ConnectionError, RuntimeError) as error:
            raise ConnectionError(f"the Ray cluster at {job.address} could not be joined: {error}") from error
        finally:  # a head node that is started later would read the variable as seconds
            if given is None:
                os.environ.pop(TRIES_VARIABLE, None)
    else:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # actors that wait should not burn a core another needs
        cpus = max(os.cpu_count() or 1, int(job.num_cpus * job.workers + 0.999))
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, **asked)


def _connection_error(address: str, seconds: float) -> str:
    """Returns the connection error as text if `address` is HOST:PORT and nothing listens there, else ''."""
    host, _, port = address.rpartition(":")
    if "/" in address or not port.isdigit():  # "auto", ray://...: Ray finds the cluster itself
        return ""
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()
    except OSError as error:
        return str(error)
    return ""
