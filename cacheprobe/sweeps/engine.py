"""Runs a sweep (`cacheprobe.sweep`): checks and locks, skips committed cells, runs the others, and reports."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cacheprobe.core.registry import find
from cacheprobe.models.plain.files import checked_device
from cacheprobe.sweeps.cells import Cell, distinguishing_labels
from cacheprobe.sweeps.events import Event, EventLog
from cacheprobe.sweeps.index import refresh
from cacheprobe.sweeps.plan import Plan, make_plan, require_room
from cacheprobe.sweeps.progress_table import ProgressTable
from cacheprobe.sweeps.settings import ConfigSource, read_config
from cacheprobe.sweeps.storage.lock import only_sweep
from cacheprobe.sweeps.storage.store import PLAN, SweepStore
from cacheprobe.sweeps.workers.holder import FULL, Job, JobOutcome
from cacheprobe.sweeps.workers.queue import Waiting

COMPLETE, FAILED, PARTIAL = 0, 1, 3
"""Exit codes of the command."""


@dataclass(frozen=True)
class SweepReport:
    """Holds the result of one start of a sweep: numbers of cells, failures, and why the sweep stopped."""

    url: str
    total: int
    """Number of cells of the plan."""
    skipped: int
    """Number of cells that were committed before."""
    committed: int
    """Number of cells that this start committed."""
    failures: tuple[JobOutcome, ...] = ()
    stopped_by: str = ""
    """Why cells were not run: Ctrl-C, a full disk, a lost cluster; '' if the sweep was not stopped."""
    names: dict[str, str] = field(default_factory=dict, repr=False)
    """Labels of the cells that are not committed, by digest."""

    @property
    def is_complete(self) -> bool:
        """Whether every cell of the plan is committed."""
        return self.skipped + self.committed == self.total

    @property
    def exit_code(self) -> int:
        """Exit code of `cacheprobe sweep`: 0 if every cell is committed; 3 if some are, or after Ctrl-C; else 1."""
        if self.is_complete:
            return COMPLETE
        return PARTIAL if self.skipped + self.committed or self.stopped_by == INTERRUPTED else FAILED

    def __str__(self) -> str:
        """Returns the report as text: numbers of cells and, if a cell is missing, failures and how to go on."""
        done = self.skipped + self.committed
        lines = [f"{done} of {self.total} cells are committed in {self.url}, {self.skipped} of them before"]
        if self.is_complete:
            return "complete: " + lines[0]
        word = "partial" if self.exit_code == PARTIAL else "failed"
        lines[0] = f"{word}: {lines[0]}"
        for cause, count in Counter(failure.cause for failure in self.failures).most_common():
            lines.append(f"{count} failed by {cause}:")
            these = [failure for failure in self.failures if failure.cause == cause]
            lines += [f"  {f.digest}  {self.names.get(f.digest, '')}: {f.message}" for f in these[:SHOWN]]
            lines += [f"  and {count - SHOWN} more, in {self.url}/events"] if count > SHOWN else []
        if left := self.total - done - len(self.failures):
            lines.append(f"{left} not run{': ' + self.stopped_by if self.stopped_by else ''}")
        lines.append("to go on, give the same command again: what is committed is skipped")
        return "\n".join(lines)


SHOWN = 5
INTERRUPTED = "interrupted"
OVER_BUDGET = "the shards have taken all of disk_budget_gb; raise it, or keep fewer sites (run.capture)"


def sweep(
    config: ConfigSource,
    *,
    out: "str | Path | None" = None,
    backend: str = "serial",
    address: str | None = None,
    workers: int | None = None,
    alone: bool = False,
    progress: bool = True,
) -> SweepReport:
    """Runs every cell of a sweep that is not committed yet, commits each as a shard (a saved run), and returns a
    SweepReport.

    config: the YAML file of a sweep, or its content.  out: folder or fsspec address of the results; overrides the
    file's.
    backend: "serial", "processes" or "ray".  address: of a Ray cluster.  workers: overrides the file's.
    alone: the caller guarantees that no other sweep writes to this object store, so no lease is taken.

    All cells are checked before any cell runs. A cell that fails is reported, and the others continue. Ctrl-C, a full
    disk or a used-up disk budget ends the sweep with a report; committed cells stay. `load_sweep` opens the results.
    Raises: ValueError for settings that cannot be met, SweepBusy if another sweep writes to the same place.
    """
    config = read_config(config)
    if out is not None and not isinstance(out, str | Path):
        raise ValueError(f"out must be the path or address of a folder, got {out!r:.60}")
    url = str(out or config.out or "")
    if not url:
        raise ValueError("say where the results go: out: in the sweep's file, or out= (--out)")
    run_cells = find("sweeps.backends", backend)
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    if address is not None and backend != "ray":
        raise ValueError(f"an address is that of a Ray cluster; the backend is {backend}")
    if backend == "ray" and config.run.device != "cpu" and not config.resources.num_gpus:
        raise ValueError(f"run.device is {config.run.device}, and Ray gives no GPU; set resources.num_gpus: 1")
    if backend != "ray":  # Ray's nodes may have devices that this machine lacks
        checked_device(config.run.device)
    plan, resources = make_plan(config), config.resources
    store = SweepStore(url)
    with only_sweep(store, alone=alone):
        store.clean()
        committed = store.committed()
        missing = {digest: cell for digest, cell in plan.cells.items() if digest not in committed}
        room = require_room(plan, store, missing)
        store.write(PLAN, json.dumps(plan.to_json(), ensure_ascii=False).encode())
        shared = (resources.threads, resources.num_cpus, resources.num_gpus, resources.retries, address)
        job = Job(store.url if not store.is_local else store.root, workers or resources.workers, *shared)
        report = _run(run_cells, plan, missing, store, job, backend, progress, room)
        store.clean()
        refresh(store)
    return report


def _run(
    run_cells: Callable[[Waiting, Job], Iterator[Event]], plan: Plan, missing: Mapping[str, Cell], store: SweepStore,
    job: Job, backend: str, progress: bool, room: float,
) -> SweepReport:  # fmt: skip
    """Runs the missing cells on a backend, logs the events, and returns the SweepReport. room: bytes left for new
    shards."""
    labels = distinguishing_labels(plan.cells)
    names = {digest: labels[digest] for digest in missing}
    failures: list[JobOutcome] = []
    committed, stopped_by = 0, ""
    skipped = len(plan.cells) - len(missing)
    waiting = Waiting(missing.values())
    progress_table = ProgressTable(len(plan.cells), skipped, names, backend, progress)
    with EventLog(store) as log, progress_table:
        log.write(Event("sweep_started"), backend=backend, total=len(plan.cells), skipped=skipped, plan=plan.digest)
        events = run_cells(waiting, job) if missing else iter(())
        try:
            for event in events:
                log.write(event)
                progress_table.show(event)
                if (outcome := event.outcome) is None:
                    continue
                names.pop(outcome.digest) if outcome.is_committed else failures.append(outcome)
                committed += outcome.is_committed
                room -= outcome.size
                if outcome.cause == FULL or room < 0:  # the other cells would fail too
                    waiting.stop()
                    stopped_by = FULL if outcome.cause == FULL else OVER_BUDGET
        except KeyboardInterrupt:
            stopped_by = INTERRUPTED
        except ConnectionError as error:
            stopped_by = str(error)
        finally:
            if (close := getattr(events, "close", None)) is not None:
                close()
        report = SweepReport(store.url, len(plan.cells), skipped, committed, tuple(failures), stopped_by, names)
        log.write(Event("sweep_ended"), exit_code=report.exit_code, committed=committed, failed=len(failures))
    return report
