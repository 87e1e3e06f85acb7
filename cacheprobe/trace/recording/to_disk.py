"""Declares where a run is recorded to disk, and lets one process write it there."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import TypedDict

from cacheprobe.core.values import JsonDict, folder, num_bytes
from cacheprobe.engine.sizes import available_bytes
from cacheprobe.trace.journal import Journal
from cacheprobe.trace.places import recording
from cacheprobe.trace.recording.background import Background
from cacheprobe.trace.recording.disk_writer import DiskWriter, part_bytes_of


class ImportOutput(TypedDict, total=False):
    """Declares the types of the optional keywords that record a run or an import to disk while it goes on."""

    out: "str | Path | None"
    """Directory in which the run is recorded, part by part; by default it is recorded in memory. The Trace is then that
    of the directory. `cp.load_trace(out)` reads it while it grows, and `cp.resume(out, model)` continues it after a
    kill. An import cannot be continued; what was written of it can be read."""
    overwrite: bool
    """Replace a run that `out` holds. The new run is recorded beside a finished one, which stays whole and is what
    `cp.load_trace(out)` reads until the new run is finished; its files are then deleted. An unfinished one is deleted
    at once."""
    memory_budget: "int | str | None"
    """Most memory for what is recorded and not on the disk yet, such as "2GB"; by default a quarter of what is free, of
    which at most 192 MiB are used. The run waits for the disk rather than hold more."""


class OutputOptions(ImportOutput, total=False):
    """Declares the types of the optional keywords of `run` and `stream` that record a run to disk while it goes on."""

    command: JsonDict
    """How the run was started, to be stored as trace.meta["command"]."""
    replay: JsonDict
    """What another program said of the tokens, to be stored as trace.meta["replay"]; set by `cp.replay`."""


@contextmanager
def to_disk(
    out: "str | Path | None" = None,
    overwrite: bool = False,
    memory_budget: "int | str | None" = None,
    journal: Journal | None = None,
    stop: Event | None = None,
) -> Iterator[DiskWriter | None]:
    """Lets only this process record a run in the directory `out` during a `with` block; see `places.recording`. Yields
    None if `out` is None.

    overwrite, memory_budget: see `OutputOptions`.  journal: of the unfinished run that goes on; None for a new one.
    stop: of `cancelling`; None for a run that Ctrl-C does not stop.
    """
    if out is None:
        if overwrite or memory_budget is not None:
            raise ValueError("overwrite and memory_budget belong to a run that is recorded to disk; set out=DIRECTORY")
        yield None
        return
    budget = (available_bytes() or 2**32) // 4 if memory_budget is None else num_bytes("memory_budget", memory_budget)
    run_id = secrets.token_hex(4) if journal is None else journal.run_id
    with recording(folder("out", out), run_id, overwrite=overwrite) as place, Background() as background:
        yield DiskWriter(place, part_bytes_of(budget), background, journal, stop)
