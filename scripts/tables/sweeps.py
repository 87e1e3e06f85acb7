"""Tables of the stored measurements of sweeps."""

import json
from pathlib import Path
from typing import Any

from cacheprobe_analyses.records import markdown_table

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
COST = {
    "serial_work_seconds": "seconds of all cells, in one process",
    "workers_wall_seconds": "seconds on the workers, with their start",
    "overhead_percent": "overhead on the workers without their start, per cent",
    "index_opened_seconds": "seconds to open a sweep of many cells",
    "grouped_query_seconds": "seconds of a grouped query over its cells",
    "layers_query_seconds": "seconds of a grouped query over their layers",
}
MACHINE = ("cpu", "cpu_capability", "torch", "transformers")


def tables() -> dict[str, str]:
    """Returns the stored results as tables, each under the command that printed it."""
    parts = (part for name, shown in PARTS.items() if (held := _read(name)) for part in shown(held))
    return {"sweeps": "\n\n".join(parts)}


def _backends(held: dict[str, Any]) -> list[str]:
    names = [
        f"{name} (not tried: {row['not_tried']})" if "not_tried" in row else name
        for name, row in held["backends"].items()
    ]
    said = "the same bytes in all files" if held["are_equal"] else "**not the same bytes in all files**"
    command = f"cacheprobe bench sweep-backends --rounds {held['rounds']} --json benchmarks/results/sweep-backends.json"
    return [f"`{command}`; {_machine(held)}: {said} ({'; '.join(names)})."]


def _cost(held: dict[str, Any]) -> list[str]:
    command = f"cacheprobe bench sweep --rounds {held['rounds']} --json benchmarks/results/sweep.json"
    table = markdown_table(("what the engine costs", "value"), [(said, held[name]) for name, said in COST.items()])
    counts = f"{held['cells']} cells on {held['workers']} workers; queries over {held['many_cells']} cells"
    return [f"`{command}`; {counts}:", table]


PARTS = {"sweep-backends": _backends, "sweep": _cost}


def _machine(held: dict[str, Any]) -> str:
    return ", ".join(f"{name} {held[name]}" if name in ("torch", "transformers") else held[name] for name in MACHINE)


def _read(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
