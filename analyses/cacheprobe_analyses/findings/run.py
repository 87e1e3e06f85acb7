"""Runs a finding over several seeds, judges it, and stores it with the machine and the versions that gave it."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from cacheprobe.core.files import write_json, write_whole
from cacheprobe.core.progress import Progress
from cacheprobe.core.registry import available, find, same_name
from cacheprobe_analyses.findings.finding import Finding, overall
from cacheprobe_analyses.records import RESULTS, markdown_table

_T_95 = {3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Student's t at 97.5 %, by number of seeds."""


@dataclass(frozen=True)
class Result:
    """Holds a finding as it was measured."""

    finding: str
    paper: str
    preset: str
    settings: dict[str, Any]
    seeds: list[int]
    lines: list[dict[str, Any]]
    """key, text, published, ours (mean over seeds), low, high (95 %), values (by seed), verdict."""
    verdict: str
    extra: dict[str, list[float]]
    """Measured values without a line, by seed."""
    points: list[dict[str, Any]]
    machine: dict[str, Any]
    seconds: float

    def table(self) -> str:
        """Returns the table in Markdown, with the verdict below it."""
        rows = [
            (x["text"], x["published"], shown(x["ours"]), f"{shown(x['low'])} to {shown(x['high'])}", x["verdict"])
            for x in self.lines
        ]
        head = ("figure", "published", "ours", f"95 %, {len(self.seeds)} seeds", "verdict")
        return f"{markdown_table(head, rows)}\n\n{self.finding} ({self.preset}): {self.verdict}"


def run_finding(name: str, preset: str, seeds: int, *, progress: bool = True) -> Result:
    """Measures a finding with the seeds 0, 1, ..., and returns its Result.

    Raises: ValueError for an unknown finding or preset, and for fewer than 3 or more than 10 seeds.
    """
    finding: Finding = find("findings", name)()
    if seeds not in _T_95:
        raise ValueError(f"--seeds must be 3 to 10, got {seeds}; an interval needs three")
    if preset not in finding.presets:
        raise ValueError(f"{name} has no preset {preset!r}; it has {', '.join(finding.presets)}")
    settings, began = finding.presets[preset], time.monotonic()
    with Progress(seeds * finding.steps(settings), f"measuring {name}", "steps", enabled=progress) as show:
        measured = [finding.measure(settings, seed, show.advance) for seed in range(seeds)]
    by_key = {key: [one.values[key] for one in measured] for key in measured[0].values}
    lines = []
    for one in finding.published:
        values = by_key.pop(one.key)
        ours, low, high = interval(values)
        lines.append(
            dict(key=one.key, text=one.text, published=one.shown, ours=ours, low=low, high=high,
                 values=[round(value, 6) for value in values], verdict=one.verdict(low, high))
        )  # fmt: skip
    return Result(
        str(same_name(name, available("findings"))), finding.paper, preset, asdict(settings), list(range(seeds)),
        lines, overall([line["verdict"] for line in lines]),
        {key: [round(value, 6) for value in values] for key, values in by_key.items()}, measured[0].points,
        _machine(), round(time.monotonic() - began, 1),
    )  # fmt: skip


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Returns (mean, low, high): the mean and its 95 % interval by Student's t. Twin: scipy.stats.t.interval,
    close(1e-3), since the table of t has three digits."""
    middle = mean(values)
    half = _T_95[len(values)] * stdev(values) / len(values) ** 0.5
    return middle, middle - half, middle + half


def stored(name: str, folder: Path = RESULTS) -> Result | None:
    """Returns the stored Result of a finding; None if there is none, as in an installed wheel."""
    path = folder / f"{name}.json"
    return Result(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def write(result: Result, out: Path) -> list[Path]:
    """Writes a Result into a folder as JSON, its table, and its figure; returns the three paths."""
    figure = find("findings", result.finding)().figure(result.points)
    base = out / result.finding
    return [
        write_json(base.with_suffix(".json"), asdict(result), indent=None),
        write_whole(base.with_suffix(".md"), lambda path: path.write_text(result.table() + "\n", encoding="utf-8")),
        write_whole(base.with_suffix(".html"), lambda path: figure.write_html(path)),
    ]


def _machine() -> dict[str, Any]:
    """Returns the processor, threads and versions."""
    import platform

    import cacheprobe
    from cacheprobe.models.settings import numeric_settings, processor_name

    facts = numeric_settings()
    versions = {key: facts[key] for key in ("torch", "transformers", "threads", "cpu_capability")}
    return {"processor": processor_name(), "python": platform.python_version(), "cacheprobe": cacheprobe.__version__,
            **versions}  # fmt: skip


def shown(value: float) -> str:
    """Returns a number with three significant digits behind the zeros, but at least three decimals."""
    return f"{value:.3f}" if abs(value) >= 0.1 else f"{value:.4f}"
