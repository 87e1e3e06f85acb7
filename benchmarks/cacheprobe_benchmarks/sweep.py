"""What a sweep's engine costs beside its work on two workers, and how soon ten thousand cells answer a question."""

import copy
import json
import tempfile
import time
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

import cacheprobe as cp
from cacheprobe.sweeps.cells import Cell
from cacheprobe.sweeps.index import INDEX
from cacheprobe.sweeps.plan import PLAN
from cacheprobe.sweeps.store import SHARDS, SweepStore
from cacheprobe_benchmarks.machine import machine, say

CELLS, WORKERS, MANY = 200, 2, 10_000
SETTINGS = {
    "grid": {"model": "coinflip-thinking", "task": "coin_flip:people=8", "window": 4, "seed": list(range(CELLS))},
    "run": {"n": 16, "max_new_tokens": 8, "capacity": 256, "capture": "SZ"},
    "resources": {"workers": WORKERS, "threads": 1},
}
QUESTION = "select task, window_rows, avg(accuracy) as accuracy, count(*) as n from cells group by all"
BY_LAYER = "select layer, avg(agrees_mean) as agrees from layers where status = 'committed' group by layer"


def run(rounds: int) -> dict[str, Any]:
    """overhead: wall time of the workers' run after their start-up, over the serial run's work divided by their number,
    less one. startup_seconds: from the sweep's start until a worker began its first cell, its model loaded."""
    with tempfile.TemporaryDirectory(prefix="cacheprobe-bench-") as held:
        folder = Path(held)
        overheads, startups, works, walls = [], [], [], []
        with measuring(2 * rounds) as bar:
            for number in range(rounds):
                work = _run(folder / f"serial-{number}", "serial")[0]
                bar.advance(note=f"serial {work:.0f} s")
                _, wall, startup = _run(folder / f"processes-{number}", "processes")
                bar.advance(note=f"{WORKERS} workers {wall:.0f} s")
                overheads.append((wall - startup) / (work / WORKERS) - 1)
                startups.append(startup)
                works.append(work)
                walls.append(wall)
        many = _many(folder / "serial-0", folder / "many", rounds)
    return {
        "benchmark": "sweep",
        "rounds": rounds,
        "cells": CELLS,
        "workers": WORKERS,
        "cell_seconds": round(median(works) / CELLS, 3),
        "serial_work_seconds": round(median(works), 1),
        "wall_seconds": round(median(walls), 1),
        "startup_seconds": round(median(startups), 1),
        "overhead": round(median(overheads), 3),
        "overheads": [round(value, 3) for value in overheads],
        **many,
        **machine(),
    }


def _run(out: Path, backend: str) -> tuple[float, float, float]:
    """(seconds of all cells, wall seconds, seconds until the first cell began), by the sweep's own log."""
    report = cp.sweep(SETTINGS, out=out, backend=backend, progress=False)
    assert report.is_complete, report
    (log,) = (out / "events").glob("*.jsonl")
    events = [json.loads(line) for line in log.read_text().splitlines()]
    ended = [event for event in events if event["event"] == "ended"]
    began, over = (datetime.fromisoformat(event["time"]).timestamp() for event in (events[0], events[-1]))
    starts = [datetime.fromisoformat(event["time"]).timestamp() - event["seconds"] for event in ended]
    say(backend, over - began)
    return sum(event["seconds"] for event in ended), over - began, min(starts) - began


def _many(real: Path, out: Path, rounds: int) -> dict[str, Any]:
    """Open and ask a sweep of MANY cells: the manifests of real ones, under other seeds, without their tables."""
    store, digests = SweepStore(out), []
    models = [json.loads(path.read_text()) for path in sorted((real / SHARDS).glob("*/manifest.json"))[:20]]
    for number in range(MANY):
        manifest = copy.deepcopy(models[number % len(models)])
        about = manifest["meta"]["sweep"]
        about["cell"]["axes"] |= {"seed": number, "window": 2 + number % 7}
        about["digest"] = Cell.from_json(about["cell"]).digest
        folder = out / SHARDS / about["digest"]
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(json.dumps(manifest))
        digests.append(about["digest"])
    plan = {"format": "cacheprobe sweep", "format_version": 1, "plan": "", "code": "", "config": {}, "digests": digests}
    store.write(PLAN, json.dumps(plan).encode())
    first, results = _timed(lambda: cp.load_sweep(out))
    assert len(results) == MANY and (out / INDEX).exists()
    opened = [_timed(lambda: cp.load_sweep(out)) for _ in range(rounds)]
    asked = [_timed(lambda: opened[-1][1].query(QUESTION))[0] for _ in range(rounds)]
    by_layer = [_timed(lambda: opened[-1][1].query(BY_LAYER))[0] for _ in range(rounds)]
    return {
        "many_cells": MANY,
        "index_made_seconds": round(first, 2),
        "index_opened_seconds": round(median(seconds for seconds, _ in opened), 3),
        "grouped_query_seconds": round(median(asked), 3),
        "layers_query_seconds": round(median(by_layer), 3),
    }


def _timed(ask: Any) -> tuple[float, Any]:
    began = time.perf_counter()
    answer = ask()
    return time.perf_counter() - began, answer
