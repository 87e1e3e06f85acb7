"""Estimates the time and disk space of a sweep: runs one cell of each model, and discards the result."""

import tempfile
import time
from collections import Counter
from pathlib import Path

from cacheprobe.core.registry import find
from cacheprobe.core.terminal import duration
from cacheprobe.sweeps.cells import ModelKey
from cacheprobe.sweeps.events import seconds_by_model
from cacheprobe.sweeps.plan import Plan, make_plan, require_room
from cacheprobe.sweeps.settings import ConfigSource, read_config
from cacheprobe.sweeps.storage.store import SweepStore


def dry_run(
    config: ConfigSource, *, out: "str | Path | None" = None, backend: str = "serial", workers: int | None = None
) -> str:
    """Checks every cell of a sweep; returns text: number of cells, estimated time and disk space. Writes no results.

    The seconds of a cell come from the event logs of earlier starts of the sweep; without logs of a model, `dry_run`
    runs one of the model's cells twice. The time includes loading the models, and is divided by the number of workers
    if the backend has several.
    Raises: ValueError for wrong settings, impossible cells, results beyond the disk budget, and a cell that fails.
    """
    settings = read_config(config)
    find("sweeps.backends", backend)
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    plan, url = make_plan(settings), str(out or settings.out or "")
    missing, store = dict(plan.cells), None
    if url:
        store = SweepStore(url)
        committed = store.committed()
        missing = {digest: cell for digest, cell in missing.items() if digest not in committed}
        require_room(plan, store, missing)
    known = seconds_by_model(store, {d: c.model_key for d, c in plan.cells.items()}) if store else {}
    work, loading, lines = 0.0, 0.0, []
    counts = Counter(cell.model_key for cell in missing.values())
    for key, count in counts.items():
        cell_seconds, load_seconds = known.get(key) or _time_one_cell(plan, key)
        work, loading = work + cell_seconds * count, loading + load_seconds
        source = f"by {'its log' if key in known else 'one that was tried'}; {duration(load_seconds)} to load it"
        lines.append(f"  {' '.join(filter(None, key))}: {count} cells of {cell_seconds:.2f} s, {source}")
    num_workers = 1 if backend == "serial" else min(workers or settings.resources.workers, max(len(missing), 1))
    size = sum(plan.sizes[digest] for digest in missing)
    total = f"{len(plan.cells)} cells, {len(plan.cells) - len(missing)} of them committed"
    budget = f", of a budget of {settings.disk_budget_gb:g} GB" if settings.disk_budget_gb else ""
    # every worker loads a model; with more models than workers, each model is loaded once
    seconds = work / num_workers + loading / min(num_workers, max(len(counts), 1))
    on = f"{num_workers} worker{'s' if num_workers > 1 else ''}, once started"
    lines = [total, *lines, f"time: about {duration(seconds)} on {on}"]
    return "\n".join([*lines, f"disk: about {size / 1e9:.3g} GB more{budget}"])


def _time_one_cell(plan: Plan, key: ModelKey) -> tuple[float, float]:
    """Runs a cell of the model `key` twice; returns (seconds of a cell, seconds of loading the model and libraries).
    Raises: ValueError if the second run fails."""
    from cacheprobe.sweeps.workers.holder import Holder

    cell = next(cell for cell in plan.cells.values() if cell.model_key == key)
    with tempfile.TemporaryDirectory(prefix="cacheprobe-try-") as folder:
        holder = Holder(folder)
        began = time.perf_counter()
        holder.run(cell.to_json())
        first_seconds, second = time.perf_counter() - began, holder.run(cell.to_json())
        if not second.is_committed:
            raise ValueError(f"a cell that was tried failed, {cell}: {second.message}")
        return second.seconds, max(first_seconds - second.seconds, 0.0)
