"""What a sweep would take: cells, disk and time, with one cell of each model tried and thrown away."""

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from cacheprobe.sweeps.board import duration
from cacheprobe.sweeps.events import seconds_by_model
from cacheprobe.sweeps.plan import Plan, make_plan, require_room
from cacheprobe.sweeps.settings import read_config
from cacheprobe.sweeps.store import SweepStore


def dry_run(
    config: Any, *, out: "str | Path | None" = None, backend: str = "serial", workers: int | None = None
) -> str:
    """Check every cell and say what the sweep would take. Writes nothing where the results go.

    Time is that of the cells of each model which the sweep's logs know, or else of one cell that is tried here, times
    its cells; over the workers, where the backend has several.
    Raises: ValueError as `sweep` does.
    """
    settings = read_config(config)
    plan, url = make_plan(settings), str(out or settings.out or "")
    missing, store = dict(plan.cells), None
    if url:
        store = SweepStore(url)
        there = store.committed()
        missing = {digest: cell for digest, cell in missing.items() if digest not in there}
        require_room(plan, store, missing)
    known = seconds_by_model(store, {d: c.model_key for d, c in plan.cells.items()}) if store else {}
    seconds, lines = 0.0, []
    for key, count in Counter(cell.model_key for cell in missing.values()).items():
        said, each, load = "by its log", known.get(key), 0.0
        if each is None:
            each, load = _try(plan, key)
            said = f"by one that was tried; its model took {duration(load)} to load"
        seconds += each * count
        name = " ".join(filter(None, key))
        lines.append(f"  {name}: {count} cells of {each:.2f} s, {said}")
    hands = 1 if backend == "serial" else min(workers or settings.resources.workers, max(len(missing), 1))
    size = sum(plan.sizes[digest] for digest in missing)
    total = f"{len(plan.cells)} cells, {len(plan.cells) - len(missing)} of them committed"
    budget = f", of a budget of {settings.disk_budget_gb:g} GB" if settings.disk_budget_gb else ""
    lines = [total, *lines, f"time: about {duration(seconds / hands)} on {hands} worker{'s' if hands > 1 else ''}"]
    return "\n".join([*lines, f"disk: about {size / 1e9:.3g} GB more{budget}"])


def _try(plan: Plan, key: Any) -> tuple[float, float]:
    """Seconds of one cell of a model, and of loading it."""
    from cacheprobe.sweeps.holder import Holder

    cell = next(cell for cell in plan.cells.values() if cell.model_key == key)
    with tempfile.TemporaryDirectory(prefix="cacheprobe-try-") as folder:
        holder = Holder(folder)
        first, second = holder.run(cell.to_json()), holder.run(cell.to_json())  # the first also loads libraries
        if not second.is_committed:
            raise ValueError(f"a cell that was tried failed, {cell}: {second.message}")
        return second.seconds, first.load_seconds
