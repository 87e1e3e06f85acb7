"""Runs cells in this process, one after another."""

from collections.abc import Iterator

from cacheprobe.core.registry import register
from cacheprobe.sweeps.events import Event
from cacheprobe.sweeps.workers.holder import Holder, Job
from cacheprobe.sweeps.workers.queue import Waiting


@register("sweeps.backends", "serial")
def serial(waiting: Waiting, job: Job) -> Iterator[Event]:
    """Yields the events of the cells. The number of processes and restarts of other backends changes no shard."""
    holder, held = Holder(job.url), None
    while (cell := waiting.take(held)) is not None:
        held = cell.model_key
        yield Event("started", cell.digest, worker="0")
        yield Event("ended", cell.digest, worker="0", outcome=holder.run(cell.to_json()))
