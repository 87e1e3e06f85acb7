"""Runs the cells of a sweep: in this process, or on a Ray cluster."""

import os
import socket
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, TypeAlias

from cacheprobe.core.registry import register
from cacheprobe.core.values import JsonDict
from cacheprobe.sweeps.cells import Cell
from cacheprobe.sweeps.run_cell import Outcome, release_model, run_and_commit
from cacheprobe.sweeps.settings import Resources

DIED = "worker died"
"""Cause in the Outcome of a cell whose worker died more often than it is tried again."""
SECONDS_BETWEEN_LOOKS = 1.0
"""Seconds after which a wait for Ray ends, so that Ctrl-C is noticed."""
SECONDS_TO_CONNECT = 5.0


Event: TypeAlias = tuple[Cell, Outcome | None]
"""A cell that starts (None), or that has ended, with its Outcome."""


@register("sweeps.backends", "serial")
def serial(cells: Sequence[Cell], url: str, resources: Resources, address: str | None) -> Iterator[Event]:
    """Runs the cells in this process, and yields an Event when a cell starts or ends."""
    try:
        for cell in cells:
            yield cell, None
            yield cell, run_and_commit(url, cell.to_json())
    finally:
        release_model()


@register("sweeps.backends", "ray")
def on_ray(cells: Sequence[Cell], url: str, resources: Resources, address: str | None) -> Iterator[Event]:
    """Runs the cells in worker processes of a Ray cluster, `resources.workers` at once. Yields an Event when a cell
    starts or ends. The cell of a worker that dies is run again by another, `resources.retries` times.

    Joins the cluster at `address`, or starts one on this machine and stops it at the end. The results must be in a
    place to which every node can write: a shared folder, or an object store.
    Raises: ValueError without Ray, ConnectionError if no cluster answers at the address, or if the cluster is lost.
    """
    try:
        import ray
        from ray.exceptions import RayError
    except ModuleNotFoundError:
        raise ValueError("this backend needs Ray: pip install 'cacheprobe[sweep]'; or use --backend serial") from None
    joined_here = not ray.is_initialized()
    if joined_here:
        _join(ray, address, resources)
    start = ray.remote(num_cpus=resources.num_cpus, num_gpus=resources.num_gpus)(CellRunner).remote
    idle = [start() for _ in range(min(resources.workers, len(cells)))]
    waiting, deaths = deque(cells), Counter[str]()
    running: dict[object, tuple[Cell, Any]] = {}
    try:
        while waiting or running:
            while idle and waiting:
                cell, worker = waiting.popleft(), idle.pop()
                running[worker.run.remote(url, cell.to_json())] = cell, worker  # pyright: ignore[reportFunctionMemberAccess]
                yield cell, None
            for reference in ray.wait(list(running), timeout=SECONDS_BETWEEN_LOOKS)[0]:
                cell, worker = running.pop(reference)
                try:
                    outcome = ray.get(reference)
                except RayError as error:
                    worker = start()
                    deaths[cell.digest] += 1
                    words = " ".join(str(error).split())[-500:]  # the reason is at the end of Ray's message
                    outcome = Outcome(cell.digest, DIED, f"{deaths[cell.digest]} times, the last by {words}")
                idle.append(worker)
                if outcome.cause == DIED and deaths[cell.digest] <= resources.retries:
                    waiting.appendleft(cell)
                else:
                    yield cell, outcome
    finally:
        if joined_here:
            ray.shutdown()


class CellRunner:
    """Runs cells in a worker process of Ray, which keeps the model of its last cell loaded."""

    def run(self, url: str, stored: JsonDict) -> Outcome:
        """Runs a cell and commits its shard, as `run_and_commit` does."""
        return run_and_commit(url, stored)


def _join(ray: ModuleType, address: str | None, resources: Resources) -> None:
    """Joins the Ray cluster at `address`; without an address, starts a cluster on this machine. Raises:
    ConnectionError if the cluster cannot be joined."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options = dict(log_to_driver=False, logging_level="error")
    if address is None:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # workers that wait should not burn a core another needs
        cpus = max(os.cpu_count() or 1, int(resources.num_cpus * resources.workers + 0.999))
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, **options)
        return
    host, _, port = address.rpartition(":")
    try:
        if port.isdigit() and "/" not in address:  # else, as for "auto" or ray://..., Ray finds the cluster itself
            socket.create_connection((host.strip("[]"), int(port)), timeout=SECONDS_TO_CONNECT).close()
        ray.init(address=address, **options)
    except (OSError, RuntimeError) as error:
        raise ConnectionError(
            f"no head node of a Ray cluster answers at {address} ({error}); start one, or look at the address"
        ) from error
