"""What a sweep would take: cells, disk and time, with one cell of each model tried and thrown away."""

import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from cacheprobe.core.registry import find
from cacheprobe.sweeps.events import seconds_by_model
from cacheprobe.sweeps.plan import Plan, make_plan, require_room
from cacheprobe.sweeps.progress_table import duration
from cacheprobe.sweeps.settings import read_config
from cacheprobe.sweeps.storage.store import SweepStore


def dry_run(
    config: Any, *, out: "str | Path | None" = None, backend: str = "serial", workers: int | None = None
) -> str:
    """Check every cell and say what the sweep would take. Writes nothing where the results go.

    Time is that of the cells of each model which the sweep's logs know, or else of one cell that is tried here, times
    its cells, and that of loading the models; over the workers, where the backend has several.
    Raises: ValueError as `sweep` does.
    """
    settings = read_config(config)
    find("sweeps.backends", backend)
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    plan, url = make_plan(settings), str(out or settings.out or "")
    missing, store = dict(plan.cells), None
    if url:
        store = SweepStore(url)
        there = store.committed()
        missing = {digest: cell for digest, cell in missing.items() if digest not in there}
        require_room(plan, store, missing)
    known = seconds_by_model(store, {d: c.model_key for d, c in plan.cells.items()}) if store else {}
    work, loading, lines = 0.0, 0.0, []
    counts = Counter(cell.model_key for cell in missing.values())
    for key, count in counts.items():
        each, load = known.get(key) or _try(plan, key)
        work, loading = work + each * count, loading + load
        said = f"by {'its log' if key in known else 'one that was tried'}; {duration(load)} to load it"
        lines.append(f"  {' '.join(filter(None, key))}: {count} cells of {each:.2f} s, {said}")
    hands = 1 if backend == "serial" else min(workers or settings.resources.workers, max(len(missing), 1))
    size = sum(plan.sizes[digest] for digest in missing)
    total = f"{len(plan.cells)} cells, {len(plan.cells) - len(missing)} of them committed"
    budget = f", of a budget of {settings.disk_budget_gb:g} GB" if settings.disk_budget_gb else ""
    # every worker loads a model, and as long as there are more models than workers, each is loaded once
    seconds = work / hands + loading / min(hands, max(len(counts), 1))
    on = f"{hands} worker{'s' if hands > 1 else ''}, once started"
    lines = [total, *lines, f"time: about {duration(seconds)} on {on}"]
    return "\n".join([*lines, f"disk: about {size / 1e9:.3g} GB more{budget}"])


def _try(plan: Plan, key: Any) -> tuple[float, float]:
    """Seconds of one cell of a model, and of loading it with the libraries that only a run needs."""
    from cacheprobe.sweeps.workers.holder import Holder

    cell = next(cell for cell in plan.cells.values() if cell.model_key == key)
    with tempfile.TemporaryDirectory(prefix="cacheprobe-try-") as folder:
        holder = Holder(folder)
        began = time.perf_counter()
        holder.run(cell.to_json())
        took, second = time.perf_counter() - began, holder.run(cell.to_json())
        if not second.is_committed:
            raise ValueError(f"a cell that was tried failed, {cell}: {second.message}")
        return second.seconds, max(took - second.seconds, 0.0)
