"""Runs a sweep (`cacheprobe.sweep`): checks and locks, skips committed cells, runs the others, and reports."""

import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cacheprobe.core.registry import find
from cacheprobe.core.terminal import Progress, duration
from cacheprobe.models.plain.files import checked_device
from cacheprobe.sweeps.backends import Event
from cacheprobe.sweeps.cells import Cell, ModelKey, distinguishing_labels
from cacheprobe.sweeps.plan import Plan, bytes_left, make_plan
from cacheprobe.sweeps.run_cell import FULL, Outcome, release_model, run_and_commit
from cacheprobe.sweeps.settings import ConfigSource, Resources, SweepConfig, read_config
from cacheprobe.sweeps.store import PLAN, SweepStore

COMPLETE, FAILED, PARTIAL = 0, 1, 3
"""Exit codes of the command."""
SHOWN = 5
INTERRUPTED = "interrupted"
OVER_BUDGET = "the shards have taken all of disk_budget_gb; raise it, or keep fewer sites (run.capture)"


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
    failures: tuple[Outcome, ...] = ()
    stopped_by: str = ""
    """Why cells were not run: Ctrl-C, a full disk, a lost cluster; '' if the sweep was not stopped."""
    names: dict[str, str] = field(default_factory=dict, repr=False)
    """Labels of the cells, by digest."""

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
            lines += [f"  and {count - SHOWN} more"] if count > SHOWN else []
        if left := self.total - done - len(self.failures):
            lines.append(f"{left} not run{': ' + self.stopped_by if self.stopped_by else ''}")
        lines.append("to go on, give the same command again: what is committed is skipped")
        return "\n".join(lines)


def sweep(
    config: ConfigSource,
    *,
    out: "str | Path | None" = None,
    backend: str = "serial",
    address: str | None = None,
    workers: int | None = None,
    progress: bool = True,
) -> SweepReport:
    """Runs every cell (run) of a sweep that is not committed in `out` yet, and returns a SweepReport.

    config: the YAML file of a sweep, or its content.  out: folder or fsspec address of the results; overrides the
    file's.
    backend: "serial" or "ray".  address: of a Ray cluster; by default one is started on this machine.  workers:
    overrides the file's.

    Before any cell runs, `make_plan` makes the parts of all cells. A cell that fails is reported, and the others
    continue. Ctrl-C, a full disk or a used-up disk budget ends the sweep with a report; committed cells stay.
    `load_sweep` opens the results.
    Raises: ValueError for settings that cannot be met, SweepBusy if another sweep writes to the same folder.
    """
    config = read_config(config)
    store = SweepStore(config.out if out is None else out)
    resources = _checked_resources(config, backend, workers)
    if address is not None and backend != "ray":
        raise ValueError(f"an address is that of a Ray cluster; the backend is {backend}")
    if backend != "ray":  # Ray's nodes may have devices that this machine lacks
        checked_device(config.run.device)
    plan = make_plan(config)
    with store.only_sweep():
        missing = _missing(plan, store)
        room = bytes_left(plan, store, missing)
        store.write(PLAN, json.dumps(plan.to_json(), ensure_ascii=False).encode())
        run_cells, url = find("sweeps.backends", backend), store.root if store.is_local else store.url
        events = run_cells(list(missing.values()), url, resources, address) if missing else iter(())
        return _run(plan, events, len(missing), store.url, progress, room)


def _checked_resources(config: SweepConfig, backend: str, workers: int | None) -> Resources:
    """Returns the resources of a sweep with this number of workers. Raises: ValueError for an unknown backend, and for
    less than one worker."""
    find("sweeps.backends", backend)
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    return config.resources.model_copy(update={"workers": workers or config.resources.workers})


def _missing(plan: Plan, store: SweepStore) -> dict[str, Cell]:
    """Returns the cells of the plan that are not committed, by digest: those of one model after the other, so that a
    worker seldom loads another."""
    committed = store.committed()
    keys = list(dict.fromkeys(cell.model_key for cell in plan.cells.values()))
    missing = [(digest, cell) for digest, cell in plan.cells.items() if digest not in committed]
    return dict(sorted(missing, key=lambda item: keys.index(item[1].model_key)))


def _run(plan: Plan, events: Iterator[Event], num_missing: int, url: str, progress: bool, room: float) -> SweepReport:
    """Runs the missing cells, whose starts and ends are `events`, and returns the SweepReport. room: bytes left for new
    shards."""
    names = distinguishing_labels(plan.cells)
    failures: list[Outcome] = []
    committed, stopped_by, total = 0, "", len(plan.cells)
    with Progress(total, "sweep", "cells", done=total - num_missing, enabled=progress) as bar:
        try:
            for cell, outcome in events:
                if outcome is None:
                    bar.set_done(bar.done, f"{len(failures)} failed, {names[cell.digest]}")
                    continue
                if outcome.cause:
                    failures.append(outcome)
                committed += not outcome.cause
                bar.advance(note=f"{len(failures)} failed, {names[cell.digest]}")
                room -= outcome.size
                if outcome.cause == FULL or room < 0:  # the other cells would fail too
                    stopped_by = FULL if outcome.cause == FULL else OVER_BUDGET
                    break
        except KeyboardInterrupt:
            stopped_by = INTERRUPTED
        except ConnectionError as error:
            stopped_by = str(error)
        finally:
            if (close := getattr(events, "close", None)) is not None:
                close()
    return SweepReport(url, total, total - num_missing, committed, tuple(failures), stopped_by, names)


def dry_run(
    config: ConfigSource, *, out: "str | Path | None" = None, backend: str = "serial", workers: int | None = None
) -> str:
    """Plans a sweep; returns text: number of cells, estimated time and disk space. Writes no results.

    Runs one cell of each model twice. The time includes loading the models, and is divided by the number of workers if
    the backend has several.
    Raises: ValueError for wrong settings, impossible cells, and a cell that fails.
    """
    settings = read_config(config)
    resources = _checked_resources(settings, backend, workers)
    plan, url = make_plan(settings), out or settings.out
    missing = _missing(plan, SweepStore(url)) if url else dict(plan.cells)
    work, loading, size, lines = 0.0, 0.0, 0, []
    counts = Counter(cell.model_key for cell in missing.values())
    for key, count in counts.items():
        first, second = _try_one_cell(plan, key)
        load_seconds = first.load_seconds + max(first.seconds - second.seconds, 0.0)
        work, loading, size = work + second.seconds * count, loading + load_seconds, size + second.size * count
        source = f"by one that was tried; {duration(load_seconds)} to load it"
        lines.append(f"  {' '.join(filter(None, key))}: {count} cells of {second.seconds:.2f} s, {source}")
    num_workers = 1 if backend == "serial" else min(resources.workers, max(len(missing), 1))
    total = f"{len(plan.cells)} cells, {len(plan.cells) - len(missing)} of them committed"
    budget = f", of a budget of {settings.disk_budget_gb:g} GB" if settings.disk_budget_gb else ""
    # every worker loads a model; with more models than workers, each model is loaded once
    seconds = work / num_workers + loading / min(num_workers, max(len(counts), 1))
    on = f"{num_workers} worker{'s' if num_workers > 1 else ''}, once started"
    lines = [total, *lines, f"time: about {duration(seconds)} on {on}"]
    return "\n".join([*lines, f"disk: about {size / 1e9:.3g} GB more{budget}"])


def _try_one_cell(plan: Plan, key: ModelKey) -> tuple[Outcome, Outcome]:
    """Runs a cell of the model `key` twice, the first time with loading the model; returns both Outcomes. Raises:
    ValueError if a run fails."""
    cell = next(cell for cell in plan.cells.values() if cell.model_key == key)
    with tempfile.TemporaryDirectory(prefix="cacheprobe-try-") as folder:
        first, second = (run_and_commit(folder, cell.to_json()) for _ in range(2))
    release_model()
    if second.cause:
        raise ValueError(f"a cell that was tried failed, {cell}: {second.message}")
    return first, second
