"""What a sweep's engine costs beside its work on two workers, and how soon ten thousand cells answer a question."""

import copy
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import cacheprobe as cp
from cacheprobe.core.registry import find
from cacheprobe.sweeps.cells import Cell
from cacheprobe.sweeps.plan import make_plan
from cacheprobe.sweeps.results import duckdb
from cacheprobe.sweeps.settings import Resources, read_config
from cacheprobe.sweeps.store import PLAN, SHARDS, SweepStore
from cacheprobe_benchmarks.shared.machine import machine, measuring, say

CELLS, WORKERS, MANY = 200, 2, 10_000
SMALL = {"cells": 4, "many": 200}
SETTINGS = {
    "grid": {"model": "coinflip-thinking", "task": "coin_flip:people=8", "window": 4},
    "run": {"n": 32, "max_new_tokens": 16, "capacity": 256, "capture": "SZ"},
    "resources": {"workers": WORKERS, "threads": 1},
}
"""Of a cell of about a second: small beside what loading a model takes, so the engine has no place to hide."""
QUESTION = "select task, window_rows, avg(accuracy) as accuracy, count(*) as n from cells group by all"
BY_LAYER = "select layer, avg(agrees_mean) as agrees from layers where status = 'committed' group by layer"


@dataclass(frozen=True)
class Log:
    """When the cells of a sweep ran."""

    work: float
    """Seconds of all cells: run and commit."""
    wall: float
    """Seconds from the sweep's start to its end."""
    startup: float
    """Of them, until the first cell began, its model loaded."""


def run(rounds: int, *, cells: int = CELLS, many: int = MANY) -> dict[str, Any]:
    """wall_over_half_of_serial: wall time of the workers' run after its start-up, over the serial run's work divided by
    their number; less one, the engine's overhead. It has two parts: cell_beside_others, how much longer a cell takes
    beside another on this machine, which no engine changes; idle_share, of the workers' time the part in no cell."""
    duckdb()  # before minutes are spent
    settings = {**SETTINGS, "grid": {**SETTINGS["grid"], "seed": list(range(cells))}}
    with tempfile.TemporaryDirectory(prefix="cacheprobe-bench-") as held:
        folder = Path(held)
        logs: list[tuple[Log, Log]] = []
        with measuring(2 * rounds) as bar:
            for number in range(rounds):
                serial = _run(settings, folder / f"serial-{number}", "serial")
                bar.advance(note=f"serial {serial.work:.0f} s")
                logs.append((serial, _run(settings, folder / f"workers-{number}", "ray")))
                bar.advance(note=f"{WORKERS} workers {logs[-1][1].wall:.0f} s")
        index = _many(folder / "serial-0", folder / "many", many, rounds)
    ratios = {
        "wall_over_half_of_serial": [(p.wall - p.startup) / (s.work / WORKERS) for s, p in logs],
        "cell_beside_others": [p.work / s.work for s, p in logs],
        "idle_share": [1 - p.work / (WORKERS * (p.wall - p.startup)) for _, p in logs],
    }
    return {
        "benchmark": "sweep",
        "rounds": rounds,
        "cells": cells,
        "workers": WORKERS,
        "cell_seconds": round(median(s.work for s, _ in logs) / cells, 3),
        "serial_work_seconds": round(median(s.work for s, _ in logs), 1),
        "workers_wall_seconds": round(median(p.wall for _, p in logs), 1),
        "workers_startup_seconds": round(median(p.startup for _, p in logs), 1),
        "overhead_percent": round(100 * (median(ratios["wall_over_half_of_serial"]) - 1), 1),
        **{name: round(median(values), 3) for name, values in ratios.items()},
        "of_each_round": {name: [round(value, 3) for value in values] for name, values in ratios.items()},
        "lower_is_better": list(ratios),
        **index,
        **machine(),
    }


def _run(settings: dict[str, Any], out: Path, backend: str) -> Log:
    """Runs the cells of a sweep on a backend, and returns when they ran."""
    plan, store = make_plan(read_config(settings)), SweepStore(out)
    store.write(PLAN, json.dumps(plan.to_json()).encode())
    began, ended = time.monotonic(), []
    run_cells = find("sweeps.backends", backend)
    for _, outcome in run_cells(list(plan.cells.values()), str(out), Resources(workers=WORKERS), None):
        if outcome is not None:
            if outcome.cause:
                raise RuntimeError(outcome.message)
            ended.append((time.monotonic(), outcome.seconds))
    wall = time.monotonic() - began
    say(backend, wall)
    return Log(sum(seconds for _, seconds in ended), wall, min(end - seconds for end, seconds in ended) - began)


def _many(real: Path, out: Path, many: int, rounds: int) -> dict[str, Any]:
    """Open and ask a sweep of so many cells: the manifests of real ones, under other seeds, without their tables."""
    store, digests = SweepStore(out), []
    models = [json.loads(path.read_text()) for path in sorted((real / SHARDS).glob("*/manifest.json"))[:20]]
    for number in range(many):
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
    opened = [_timed(lambda: cp.load_sweep(out)) for _ in range(rounds)]
    assert len(opened[0][1]) == many
    asked = [_timed(lambda: opened[-1][1].query(QUESTION))[0] for _ in range(rounds)]
    by_layer = [_timed(lambda: opened[-1][1].query(BY_LAYER))[0] for _ in range(rounds)]
    return {
        "many_cells": many,
        "index_opened_seconds": round(median(seconds for seconds, _ in opened), 3),
        "grouped_query_seconds": round(median(asked), 3),
        "layers_query_seconds": round(median(by_layer), 3),
    }


def _timed(ask: Any) -> tuple[float, Any]:
    began = time.perf_counter()
    answer = ask()
    return time.perf_counter() - began, answer
