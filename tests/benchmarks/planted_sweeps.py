"""Costs that tests plant into the benchmarks of sweeps, and into that of rollbacks of recurrent states."""

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import cacheprobe as cp
from cacheprobe_benchmarks.speed import recurrent_rollback
from cacheprobe_benchmarks.sweeps import sweep, sweep_backends, sweep_faults
from cacheprobe_benchmarks.sweeps.struck import FaultOutcome
from tests.planted_costs import Clock


def of_sweep(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Four cells of ten seconds one after another; on two workers, of eleven seconds each in a run of 30 seconds, of
    which 5 are start-up. A real sweep of this size takes half a minute; the commands' tests run those."""

    def told(settings: Any, *, out: Path, backend: str, progress: bool) -> Any:
        began, (start, took, at_once) = datetime(2026, 1, 1, tzinfo=UTC), SWEPT[backend]
        ends = [start + took * (1 + cell // at_once) for cell in range(4)]
        events = [{"event": "started", "at": 0.0}]
        events += [{"event": "ended", "at": end, "seconds": took} for end in ends]
        events.append({"event": "over", "at": 30.0 if backend == "processes" else ends[-1]})
        (out / "events").mkdir(parents=True)
        lines = [{**one, "time": (began + timedelta(seconds=one["at"])).isoformat()} for one in events]
        (out / "events" / "log.jsonl").write_text("\n".join(map(json.dumps, lines)))
        return SimpleNamespace(is_complete=True)

    monkeypatch.setattr(cp, "sweep", told)
    monkeypatch.setattr(sweep, "_many", lambda *args: {})
    return {
        "wall_over_half_of_serial": 1.25, "cell_beside_others": 1.1, "idle_share": 0.12, "overhead_percent": 25.0,
        "cell_seconds": 10, "serial_work_seconds": 40, "workers_wall_seconds": 30, "workers_startup_seconds": 5,
    }  # fmt: skip


SWEPT = {"serial": (1.0, 10.0, 1), "processes": (5.0, 11.0, 2)}
"""By backend: seconds before the first cell, seconds of a cell, cells at once."""


def of_sweep_backends(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """One backend's bytes differ from the other's; real commands take a minute."""

    def given(held: str) -> Callable[[Path], sweep_backends.Place]:
        def place(folder: Path) -> sweep_backends.Place:
            (folder / "shards" / "one").mkdir(parents=True)
            (folder / "events").mkdir()
            (folder / "shards" / "one" / "file").write_text(held)
            (folder / "events" / "log.jsonl").write_text('{"event": "ended", "worker": 1}\n')
            return sweep_backends.Place(folder, 2.0)

        return place

    monkeypatch.setitem(sweep_backends.BACKENDS, "serial", given("these"))
    monkeypatch.setitem(sweep_backends.BACKENDS, "processes", given("others"))
    return {"are_equal": False, "backends serial cells": 1, "backends processes seconds": 2.0}


def of_sweep_faults(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Of two faults one leaves other bytes; real sweeps that are struck take a minute."""
    first, second = sweep_faults.SMALL["only"]
    wanted = {"one/file": "digest"}
    monkeypatch.setattr(sweep_faults, "Struck", lambda folder: SimpleNamespace(finish=lambda: 1, url=folder))
    monkeypatch.setattr(sweep_faults, "digests", lambda folder: wanted)
    monkeypatch.setitem(sweep_faults.FAULTS, first, lambda folder, chance: FaultOutcome(wanted, 1, 1, -9))
    monkeypatch.setitem(
        sweep_faults.FAULTS, second, lambda folder, chance: FaultOutcome({"one/file": "other"}, 1, 2, -9)
    )
    return {
        f"faults {first} equal_to_serial": 1, f"faults {second} equal_to_serial": 0, f"faults {second} resumes": 2,
        f"faults {second} struck": 1,
    }  # fmt: skip


def of_recurrent_rollback(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """A kept state costs two hours, an accepted token that is fed again three, a chunk one."""
    for name, hours in (("kept", 2), ("replayed", 3), ("chunked", 1)):
        monkeypatch.setitem(recurrent_rollback.WAYS, name, clock.costing(recurrent_rollback.WAYS[name], hours))
    return {"window 4 over_kept replayed": 1.5, "window 4 over_kept chunked": 0.5}
