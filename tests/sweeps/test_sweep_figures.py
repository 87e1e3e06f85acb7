"""What is stored of sweeps' benchmarks: on the page as it was measured, and as good as it is said to be."""

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
SCRIPT = ROOT / "scripts" / "tables" / "sweeps.py"


def backends_are_equal(held: dict[str, Any]) -> bool:
    tried = {name: row for name, row in held["backends"].items() if "not_tried" not in row}
    return (
        held["are_equal"]
        and len({row["digest"] for row in tried.values()}) == 1
        and {"serial", "Ray on two nodes"} <= set(tried)
    )


def answers_soon(held: dict[str, Any]) -> bool:
    soon = held["grouped_query_seconds"] < 1 and held["layers_query_seconds"] < 1 and held["index_opened_seconds"] < 2
    return soon and held["many_cells"] == 10_000 and held["cells"] == 200 and held["overhead_percent"] <= 10


RULES: dict[str, Callable[[dict[str, Any]], bool]] = {
    "sweep-backends": backends_are_equal, "sweep": answers_soon,
}  # fmt: skip


def test_the_table_has_what_is_stored(tmp_path: Path) -> None:
    """Lines for each result that is stored, none for those that are not."""
    script = runpy.run_path(str(SCRIPT))
    script["tables"].__globals__["RESULTS"] = tmp_path
    assert script["tables"]() == {"sweeps": ""}
    (tmp_path / "sweep.json").write_text((RESULTS / "sweep.json").read_text())
    table = script["tables"]()["sweeps"]
    assert "| seconds of all cells, in one process | 160.6 |" in table and "the same bytes" not in table


def test_what_is_stored_is_as_good_as_it_is_said_to_be() -> None:
    """Of the two that are measured by hand, those that are stored."""
    stored = {name: RESULTS / f"{name}.json" for name in RULES if (RESULTS / f"{name}.json").exists()}
    assert "sweep-backends" in stored
    assert [name for name, path in stored.items() if not RULES[name](json.loads(path.read_text("utf-8")))] == []
