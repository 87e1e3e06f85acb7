"""What is stored of sweeps' benchmarks: on the page as it was measured, and as good as it is said to be."""

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
SCRIPT = ROOT / "scripts" / "tables" / "sweeps.py"
MACHINE = {"cpu": "a processor", "cpu_capability": "AVX512", "torch": "2", "transformers": "5"}
FAULTS = {
    "benchmark": "sweep-faults", "rounds": 20, "cells": 16, **MACHINE,
    "faults": {
        "SIGKILL of a worker": {
            "struck": 19, "exit_codes": {"-9": 1, "0": 19}, "resumes": 1, "equal_to_serial": 20, "of": 20,
        },
        "Ray: a worker node is lost": {"not_tried": "Ray is not installed"},
    },
}  # fmt: skip


def faults_are_survived(held: dict[str, Any]) -> bool:
    rows, rounds = [row for row in held["faults"].values() if "not_tried" not in row], held["rounds"]
    struck = all(row["struck"] >= 0.9 * rounds for row in rows)  # one may be over before it is struck
    return struck and rounds >= 20 and all(row["equal_to_serial"] == row["of"] == rounds for row in rows)


def backends_are_equal(held: dict[str, Any]) -> bool:
    tried = {name: row for name, row in held["backends"].items() if "not_tried" not in row}
    return (
        held["are_equal"]
        and len({row["digest"] for row in tried.values()}) == 1
        and {"serial", "processes", "Ray on two nodes"} <= set(tried)
        and tried["processes"]["workers"] == tried["Ray on two nodes"]["workers"] == 2
    )


def answers_soon(held: dict[str, Any]) -> bool:
    soon = held["grouped_query_seconds"] < 1 and held["layers_query_seconds"] < 1 and held["index_opened_seconds"] < 2
    return soon and held["many_cells"] == 10_000 and held["cells"] == 200 and held["overhead_percent"] <= 10


RULES: dict[str, Callable[[dict[str, Any]], bool]] = {
    "sweep-faults": faults_are_survived, "sweep-backends": backends_are_equal, "sweep": answers_soon,
}  # fmt: skip


def test_the_table_has_what_is_stored(tmp_path: Path) -> None:
    """Lines for each result that is stored, none for those that are not."""
    script = runpy.run_path(str(SCRIPT))
    script["tables"].__globals__["RESULTS"] = tmp_path
    assert script["tables"]() == {"sweeps": ""}
    (tmp_path / "sweep-faults.json").write_text(json.dumps(FAULTS))
    table = script["tables"]()["sweeps"]
    assert "| SIGKILL of a worker | 19 | -9: 1, 0: 19 | 1 | 20 of 20 |" in table
    assert "| Ray: a worker node is lost | not tried: Ray is not installed |  |  |  |" in table
    assert "sweep-faults --rounds 20 --json benchmarks/results/sweep-faults.json`, 16 cells; a processor" in table
    assert "what the engine costs" not in table


def test_what_is_stored_is_as_good_as_it_is_said_to_be() -> None:
    """Of the three that are measured by hand, those that are stored."""
    stored = {name: RESULTS / f"{name}.json" for name in RULES if (RESULTS / f"{name}.json").exists()}
    assert "sweep-backends" in stored
    assert [name for name, path in stored.items() if not RULES[name](json.loads(path.read_text("utf-8")))] == []


def test_what_is_not_good_is_told() -> None:
    assert faults_are_survived(FAULTS) and not faults_are_survived({**FAULTS, "rounds": 19})
    lost = {"SIGKILL of a worker": {**FAULTS["faults"]["SIGKILL of a worker"], "equal_to_serial": 19}}
    assert not faults_are_survived({**FAULTS, "faults": lost})
    missed = {"SIGKILL of a worker": {**FAULTS["faults"]["SIGKILL of a worker"], "struck": 17}}
    assert not faults_are_survived({**FAULTS, "faults": missed})
    held = json.loads((RESULTS / "sweep-backends.json").read_text("utf-8"))
    held["backends"]["processes"]["digest"] = "another"
    assert not backends_are_equal(held)
    quick = dict(
        many_cells=10_000, cells=200, index_opened_seconds=1.9, grouped_query_seconds=0.9, layers_query_seconds=0.9,
        overhead_percent=9.9,
    )  # fmt: skip
    assert answers_soon(quick)
    assert not any(answers_soon({**quick, name: quick[name] + 1}) for name in quick)
