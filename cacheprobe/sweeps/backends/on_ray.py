"""On a Ray cluster: one actor holds one model. Placement, retries and the restart of dead actors are Ray's.

A task is retried for as long as its actor may come back: while a lost node is not yet known to be lost, Ray calls its
actors unavailable, and a number of retries would be spent within seconds. What is counted is restarts.
"""

import math
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

from cacheprobe.core.registry import register
from cacheprobe.sweeps.backends.processes import DIED
from cacheprobe.sweeps.cells import Cell
from cacheprobe.sweeps.events import Event
from cacheprobe.sweeps.workers.holder import Holder, Job, Outcome
from cacheprobe.sweeps.workers.queue import Waiting

SECONDS_BETWEEN_LOOKS = 1.0
"""So that Ctrl-C is heard."""
SECONDS_WITHOUT_HEAD = 20.0
"""Time for a head node to come back. After 60 s without one Ray ends the program, and nobody hears what came of it."""

SECONDS_TO_CONNECT = 5.0
TRIES_VARIABLE, TRIES_TO_JOIN = "RAY_gcs_server_port_wait_time_s", 2
"""Of forty seconds each, where something listens that never answers; Ray by itself tries twenty times, in silence."""


class _Watch:
    """Whether there is a cluster. Ray says of a lost head node nothing, and then ends the program."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self.address: str = ray.get_runtime_context().gcs_address
        self._seen = self._looked = time.monotonic()
        self._answers = True

    def look(self) -> bool:
        """Whether the head node answers. Raises: ConnectionError where it has not for a while, or no node is left."""
        if time.monotonic() - self._looked > SECONDS_BETWEEN_LOOKS:
            self._answers = self._is_there()
            self._looked = time.monotonic()
        return self._answers

    def wait(self) -> None:
        """Until the head node answers: what Ray asks of it, such as a new actor, would not return without it."""
        self._looked = -math.inf
        while not self.look():
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def _is_there(self) -> bool:
        if why := _unheard(self.address, SECONDS_BETWEEN_LOOKS):
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
    """A place for one actor; another model takes another actor."""

    def __init__(self, name: str, job: Job, watch: _Watch) -> None:
        self.name, self.job, self._watch = name, job, watch
        self.cell: Cell | None = None
        self.actor: Any = None
        self.held: Any = None
        self.answered = 0
        """Cells that the actor has answered for."""

    def give(self, cell: Cell) -> Any:
        """The reference to what will become of the cell."""
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
        import ray

        if self.actor is not None:
            ray.kill(self.actor)
        self.actor = self.held = None
        self.answered = 0


@register("sweeps.backends", "ray")
def on_ray(waiting: Waiting, job: Job) -> Iterator[Event]:
    """Yields what happens. Joins the cluster of `job.address`, or starts one on this machine and stops it at the end.

    Results must go where every node writes: a shared folder, or an object store.
    Raises: ValueError without Ray, ConnectionError where there is no cluster at the address, or none any more.
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
    running: dict[Any, _Slot] = {}
    given_back: set[str] = set()
    try:
        for slot in slots:
            yield from _hand(slot, waiting, running)
        while running:
            ready, _ = ray.wait(list(running), timeout=SECONDS_BETWEEN_LOOKS)
            watch.look()
            for reference in ready:
                slot = running.pop(reference)
                assert slot.cell is not None
                try:
                    outcome = ray.get(reference)
                    slot.answered += 1
                except RayError as error:  # Ray has restarted the actor as often as it was asked to
                    yield from _bury(slot, waiting, error, given_back)
                else:
                    yield Event("ended", slot.cell.digest, worker=slot.name, outcome=outcome)
                yield from _hand(slot, waiting, running)
    finally:
        for slot in slots:
            slot.end()
        if is_mine:
            ray.shutdown()


def _bury(slot: _Slot, waiting: Waiting, error: Exception, given_back: set[str]) -> Iterator[Event]:
    """The cell of a lost actor has failed; but where the actor ran others too, and may have spent its restarts on them,
    the cell is given back, once."""
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


def _hand(slot: _Slot, waiting: Waiting, running: dict[Any, _Slot]) -> Iterator[Event]:
    if (cell := waiting.take(slot.held)) is None:
        slot.end()  # what it held is free for the others
        return
    running[slot.give(cell)] = slot
    yield Event("started", cell.digest, worker=slot.name)


def _join(ray: Any, job: Job) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    asked = dict(log_to_driver=False, logging_level="error")
    if job.address is not None:
        if why := _unheard(job.address, SECONDS_TO_CONNECT):
            raise ConnectionError(
                f"no head node of a Ray cluster answers at {job.address} ({why}); start one, or look at the address"
            )
        given = os.environ.get(TRIES_VARIABLE)
        os.environ.setdefault(TRIES_VARIABLE, str(TRIES_TO_JOIN))
        try:
            ray.init(address=job.address, **asked)
        except (ConnectionError, RuntimeError) as error:
            raise ConnectionError(f"the Ray cluster at {job.address} could not be joined: {error}") from error
        finally:  # a head node that is started later reads it as seconds
            if given is None:
                os.environ.pop(TRIES_VARIABLE, None)
    else:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # actors that wait should not burn a core another needs
        cpus = max(os.cpu_count() or 1, int(job.num_cpus * job.workers + 0.999))
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, **asked)


def _unheard(address: str, seconds: float) -> str:
    """Why nothing listens at an address, where it is HOST:PORT and nothing does; otherwise nothing."""
    host, _, port = address.rpartition(":")
    if "/" in address or not port.isdigit():  # "auto", ray://...: Ray looks for itself
        return ""
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()
    except OSError as error:
        return str(error)
    return ""
