"""Write the stored measurements of sweeps into docs/sweeps.md: python scripts/write_sweep_figures.py."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "sweeps.md"
BEGIN, END = "<!-- figures: written by scripts/write_sweep_figures.py -->", "<!-- end of figures -->"
COST = {
    "cells": "cells",
    "cell_seconds": "seconds of a cell, in one process",
    "serial_work_seconds": "seconds of all cells, in one process",
    "workers": "workers",
    "workers_startup_seconds": "seconds until the first worker begins its first cell",
    "workers_wall_seconds": "seconds of the sweep on the workers, start-up included",
    "overhead_percent": "of that without the start-up: percent above the cells' seconds over the workers",
    "cell_in_company": "a cell's seconds beside another over its seconds alone, which is the machine's doing",
    "idle_share": "share of the workers' time in no cell, which is the engine's",
    "many_cells": "cells of a large sweep",
    "index_made_seconds": "seconds to open it the first time, without an index",
    "index_opened_seconds": "seconds to open it",
    "grouped_query_seconds": "seconds of a grouped query over its cells",
    "layers_query_seconds": "seconds of a grouped query over their layers",
}
MACHINE = ("cpu", "cpu_capability", "torch", "transformers")


def figures() -> str:
    """The stored results as tables, each with the command that printed it."""
    return "\n\n".join(part for name, shown in PARTS.items() if (held := _read(name)) for part in shown(held))


def _backends(held: dict[str, Any]) -> list[str]:
    lines = ["| where | cells | files | workers | digest of all files |", "|---|---|---|---|---|"]
    for name, row in held["backends"].items():
        if "not_tried" in row:
            lines.append(f"| {name} | not tried: {row['not_tried']} | | | |")
        else:
            lines.append(f"| {name} | {row['cells']} | {row['files']} | {row['workers']} | `{row['digest']}` |")
    command = f"cacheprobe bench sweep-backends --rounds {held['rounds']} --json benchmarks/results/sweep-backends.json"
    said = "all equal" if held["are_equal"] else "**not all equal**"
    return ["### The same bytes everywhere", f"`{command}`; {_machine(held)}: {said}.", "\n".join(lines)]


def _faults(held: dict[str, Any]) -> list[str]:
    lines = ["| fault | struck | exit codes | resumes | equal to serial |", "|---|---|---|---|---|"]
    for name, row in held["faults"].items():
        if "not_tried" in row:
            lines.append(f"| {name} | not tried: {row['not_tried']} | | | |")
            continue
        codes = ", ".join(f"{code}: {count}" for code, count in row["exit_codes"].items())
        lines.append(
            f"| {name} | {row['struck']} | {codes} | {row['resumes']} | {row['equal_to_serial']} of {row['of']} |"
        )
    command = f"cacheprobe bench sweep-faults --rounds {held['rounds']} --json benchmarks/results/sweep-faults.json"
    return ["### Faults", f"`{command}`, {held['cells']} cells; {_machine(held)}:", "\n".join(lines)]


def _cost(held: dict[str, Any]) -> list[str]:
    rows = [f"| {said} | {held[name]} |" for name, said in COST.items()]
    command = f"cacheprobe bench sweep --rounds {held['rounds']} --json benchmarks/results/sweep.json"
    table = "\n".join(["| figure | value |", "|---|---|", *rows])
    return ["### What the engine costs", f"`{command}`; {_machine(held)}:", table]


PARTS = {"sweep-backends": _backends, "sweep-faults": _faults, "sweep": _cost}


def _machine(held: dict[str, Any]) -> str:
    return ", ".join(f"{name} {held[name]}" if name in ("torch", "transformers") else held[name] for name in MACHINE)


def _read(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def page(text: str) -> str:
    """The page with the figures of today between its two marks."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{figures()}\n\n{END}{rest.split(END)[1]}"


def main() -> None:
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
