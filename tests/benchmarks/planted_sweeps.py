"""Costs that tests plant into benchmarks: sweeps, the overview, rollbacks of recurrent states, other models, memory."""

import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import cacheprobe as cp
from cacheprobe_benchmarks.catalogue import small
from cacheprobe_benchmarks.speed import overview, page, recurrent_rollback
from cacheprobe_benchmarks.states import families, memory, own_model, sizes
from cacheprobe_benchmarks.sweeps import sweep, sweep_backends
from tests.planted_costs import HOUR, Clock


def of_sweep(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Four cells of ten seconds one after another; on two workers, of eleven seconds each in a run of 30 seconds, of
    which 5 are start-up. A real sweep of this size takes half a minute; the commands' tests run those."""
    monkeypatch.setattr(sweep, "_run", lambda settings, out, backend: SWEPT[backend])
    monkeypatch.setattr(sweep, "_many", lambda *args: {})
    return {
        "wall_over_half_of_serial": 1.25, "cell_beside_others": 1.1, "idle_share": 0.12, "overhead_percent": 25.0,
        "cell_seconds": 10, "serial_work_seconds": 40, "workers_wall_seconds": 30, "workers_startup_seconds": 5,
    }  # fmt: skip


SWEPT = {"serial": sweep.Log(40.0, 41.0, 1.0), "ray": sweep.Log(44.0, 30.0, 5.0)}


def of_overview(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Opening takes a second of the page's clock, and an answer of the server two hours."""
    evaluate = page.Page.evaluate

    def costly(opened: page.Page, expression: str, given: Any) -> float:
        evaluate(opened, expression, given)
        return 1000

    monkeypatch.setattr(page.Page, "evaluate", costly)
    clock.plant(overview.urllib.request, "urlopen", 2)
    searches = {f"{name}_ms": 2000 * HOUR for name in overview.SEARCHES}
    return {"first_ms": 1000, "paint_ms": 1000, **searches}


def of_sweep_backends(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """One backend's bytes differ from the other's; real sweeps take a minute."""

    def given(held: str) -> Callable[[Path], Path]:
        def place(folder: Path) -> Path:
            (folder / "shards" / "one").mkdir(parents=True)
            (folder / "shards" / "one" / "file").write_text(held)
            return folder

        return clock.costing(place, 2.0)

    monkeypatch.setitem(sweep_backends.BACKENDS, "serial", given("these"))
    monkeypatch.setitem(sweep_backends.BACKENDS, "Ray on two nodes", given("others"))
    return {"are_equal": False, "backends serial cells": 1, "backends Ray on two nodes seconds": 2.0 * HOUR}


def of_recurrent_rollback(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """A kept state costs two hours, an accepted token that is fed again three, a chunk one."""
    for name, hours in (("kept", 2), ("replayed", 3), ("chunked", 1)):
        monkeypatch.setitem(recurrent_rollback.WAYS, name, clock.costing(recurrent_rollback.WAYS[name], hours))
    return {"window 4 over_kept replayed": 1.5, "window 4 over_kept chunked": 0.5}


def of_drafts(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Hours of a run with each drafter, over one hour of a run without."""
    hours = {"NoneType": 1, "NGram": 2, "EarlyExit": 3, "DraftModel": 4}
    clock.plant(cp, "run", lambda *given, drafter, **settings: hours[type(drafter).__name__])
    name = "over_undrafted smollm2-135m bfloat16 nothing"
    return {f"{name} ngram": 2, f"{name} early_exit": 3, f"{name} draft_model": 4}


def of_families(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """An hour for S, T and C and three with Z; two for generate with hooks, four for their lens."""
    clock.plant(cp, "run", lambda *args, capture, **settings: {"STC": 1, "STCZ": 3}[capture])
    clock.plant(families, "generated", 2)
    clock.plant(families, "lens_by_torch", 4)
    return {"measured phi3 bfloat16 hooks_ratio": 0.5, "measured phi3 bfloat16 lens_ratio": 0.5}


def of_own_model(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The same; a first run of six hours and later ones of four."""
    found = of_families(clock, monkeypatch)
    monkeypatch.setattr(own_model, "_printed", lambda code, *_, **__: [6.0, 5.0, 4.0] if "cp.run" in code else [2.0])
    name = "measured smollm2-135m"
    return {
        **{key.replace("measured phi3", name): ratio for key, ratio in found.items()},
        f"{name} load_ratio": 1, f"{name} bfloat16 first_run_ratio": 1.5,
    }  # fmt: skip


def of_memory(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """A run that keeps 4 gigabytes beside its trace; the peak of two processes differs by some tens of megabytes."""
    without = small("memory")(1)["beyond_trace_mb"]
    monkeypatch.setattr(memory, "subprocess", _children_that_keep_4_gb())
    return {"beyond_trace_mb": without + 4000}


def of_sizes(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The same beside the model."""
    without = small("sizes")(1)["peak_gb"]
    monkeypatch.setattr(sizes, "subprocess", _children_that_keep_4_gb())
    return {"peak_gb": without + 4}


def _children_that_keep_4_gb() -> Any:
    """Returns a module `subprocess` for such processes."""
    hold = "import torch, cacheprobe as cp; kept, run = [], cp.run; "
    hold += "cp.run = lambda *a, **s: (kept.append(torch.ones(10**9)), run(*a, **s))[1]; "

    def started(start: Any, command: list[str], **settings: Any) -> Any:
        return start([*command[:-1], hold + command[-1]], **settings)

    run, popen = partial(started, subprocess.run), partial(started, subprocess.Popen)
    return SimpleNamespace(run=run, Popen=popen, PIPE=subprocess.PIPE)
