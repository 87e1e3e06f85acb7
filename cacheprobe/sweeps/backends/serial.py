"""Runs the cells (runs) of a sweep in this process, one after another."""

from collections.abc import Iterator

from cacheprobe.core.registry import register
from cacheprobe.sweeps.events import Event
from cacheprobe.sweeps.workers.holder import Holder, Job
from cacheprobe.sweeps.workers.queue import Waiting


@register("sweeps.backends", "serial")
def serial(waiting: Waiting, job: Job) -> Iterator[Event]:
    """Runs the waiting cells in this process, and yields an Event when a cell starts or ends."""
    holder, model_key = Holder(job.url), None
    while (cell := waiting.take(model_key)) is not None:
        model_key = cell.model_key
        yield Event("started", cell.digest, worker="0")
        yield Event("ended", cell.digest, worker="0", outcome=holder.run(cell.to_json()))
