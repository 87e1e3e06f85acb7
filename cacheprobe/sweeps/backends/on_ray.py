"""On a Ray cluster: one actor holds one model. Placement, retries and the restart of dead actors are Ray's."""

import os
from collections.abc import Iterator
from typing import Any

from cacheprobe.registry import register
from cacheprobe.sweeps.backends.processes import DIED
from cacheprobe.sweeps.cells import Cell
from cacheprobe.sweeps.events import Event
from cacheprobe.sweeps.holder import Holder, Job, Outcome
from cacheprobe.sweeps.waiting import Waiting

SECONDS_BETWEEN_LOOKS = 1.0
"""So that Ctrl-C is heard."""


class _Slot:
    """A place for one actor; another model takes another actor."""

    def __init__(self, name: str, job: Job) -> None:
        self.name, self.job = name, job
        self.cell: Cell | None = None
        self.actor: Any = None
        self.held: Any = None

    def give(self, cell: Cell) -> Any:
        """The reference to what will become of the cell."""
        import ray

        if self.held != cell.model_key:
            self.end()
        if self.actor is None:
            job = self.job
            remote = ray.remote(
                num_cpus=job.num_cpus, num_gpus=job.num_gpus, max_restarts=-1, max_task_retries=job.retries
            )(Holder)
            self.actor = remote.remote(job.url)
        self.cell, self.held = cell, cell.model_key
        return self.actor.run.remote(cell.to_json())

    def end(self) -> None:
        import ray

        if self.actor is not None:
            ray.kill(self.actor)
        self.actor = self.held = None


@register("sweeps.backends", "ray")
def on_ray(waiting: Waiting, job: Job) -> Iterator[Event]:
    """Yields what happens. Joins the cluster of `job.address`, or starts one on this machine and stops it at the end.

    Results must go where every node writes: a shared folder, or an object store.
    Raises: ValueError without Ray, ConnectionError where there is no cluster at the address.
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
    slots = [_Slot(str(i), job) for i in range(min(job.workers, len(waiting)))]
    running: dict[Any, _Slot] = {}
    try:
        for slot in slots:
            yield from _hand(slot, waiting, running)
        while running:
            ready, _ = ray.wait(list(running), timeout=SECONDS_BETWEEN_LOOKS)
            for reference in ready:
                slot = running.pop(reference)
                assert slot.cell is not None
                try:
                    outcome = ray.get(reference)
                except RayError as error:  # Ray has tried it again, as often as it was asked to
                    words = str(error).strip().splitlines()[0]
                    outcome = Outcome(slot.cell.digest, DIED, f"{type(error).__name__}: {words}")
                    yield Event("worker_died", slot.cell.digest, worker=slot.name, message=words)
                    slot.end()
                yield Event("ended", slot.cell.digest, worker=slot.name, outcome=outcome)
                yield from _hand(slot, waiting, running)
    finally:
        for slot in slots:
            slot.end()
        if is_mine:
            ray.shutdown()


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
        ray.init(address=job.address, **asked)
    else:
        cpus = max(os.cpu_count() or 1, int(job.num_cpus * job.workers + 0.999))
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, **asked)
