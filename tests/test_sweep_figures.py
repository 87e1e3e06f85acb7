"""What is stored of sweeps' benchmarks: on the page as it was measured, and as good as it is said to be."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "write_sweep_figures.py"
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


def stored(name: str) -> dict[str, Any]:
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    if not path.exists():
        pytest.skip(f"{path.name} was not measured yet: cacheprobe bench {name} --json {path.relative_to(ROOT)}")
    return json.loads(path.read_text(encoding="utf-8"))


def test_the_page_takes_what_is_there(tmp_path: Path) -> None:
    """A figure for each result that is stored, none for those that are not, and nothing of before."""
    script = runpy.run_path(str(SCRIPT))
    script["page"].__globals__["RESULTS"] = tmp_path
    text = f"before\n\n{script['BEGIN']}\n\nold figures\n\n{script['END']}\n\nafter\n"
    empty = script["page"](text)
    assert "old figures" not in empty and empty.startswith("before\n") and empty.endswith("after\n")
    (tmp_path / "sweep-faults.json").write_text(json.dumps(FAULTS))
    page = script["page"](text)
    assert "| SIGKILL of a worker | 19 | -9: 1, 0: 19 | 1 | 20 of 20 |" in page
    assert "| Ray: a worker node is lost | not tried: Ray is not installed | | | |" in page
    assert "sweep-faults --rounds 20 --json benchmarks/results/sweep-faults.json`, 16 cells; a processor" in page
    assert script["page"](page) == page and "What the engine costs" not in page


def test_every_struck_sweep_ended_with_the_bytes_of_an_undisturbed_one() -> None:
    held = stored("sweep-faults")
    assert held["rounds"] >= 20
    for name, row in held["faults"].items():
        assert "not_tried" in row or row["equal_to_serial"] == row["of"] == held["rounds"], name


def test_every_backend_gave_the_same_bytes() -> None:
    held = stored("sweep-backends")
    tried = {name: row for name, row in held["backends"].items() if "not_tried" not in row}
    assert held["are_equal"] and len({row["digest"] for row in tried.values()}) == 1
    assert {"serial", "processes", "Ray on two nodes"} <= set(tried)
    assert tried["processes"]["workers"] == tried["Ray on two nodes"]["workers"] == 2


def test_ten_thousand_cells_answer_soon() -> None:
    held = stored("sweep")
    assert held["many_cells"] == 10_000 and held["cells"] == 200
    assert held["index_opened_seconds"] < 2 and held["grouped_query_seconds"] < 1 and held["layers_query_seconds"] < 1
