"""Runs a finding over several seeds, judges it, and stores it with the machine and the versions that gave it."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import floor, isfinite, log10
from pathlib import Path
from statistics import mean
from typing import Any

from cacheprobe.core.files import write_json, write_whole
from cacheprobe.core.registry import available, find, same_name
from cacheprobe.core.terminal import Progress
from cacheprobe_analyses.findings.finding import LEAST_SEEDS, Finding, Published, interval, overall
from cacheprobe_analyses.records import RESULTS, markdown_table

MOST_SEEDS = 10


@dataclass(frozen=True)
class Result:
    """Holds a finding as it was measured."""

    finding: str
    paper: str
    preset: str
    settings: dict[str, Any]
    seeds: list[int]
    lines: list[dict[str, Any]]
    """key, text, published, ours (mean over seeds), low, high (95 %), values (by seed), verdict. A value that is not
    defined is None, and left out of the mean; so are low and high if fewer than two are defined."""
    verdict: str
    extra: dict[str, list[float | None]]
    """Measured values without a line, by seed."""
    points: list[dict[str, Any]]
    machine: dict[str, Any]
    seconds: float

    def table(self) -> str:
        """Returns the table in Markdown, with the verdict below it."""
        rows = [
            (x["text"], x["published"], f"{shown(x['ours'])}{undefined(x)}",
             "" if x["low"] is None else f"{shown(x['low'])} to {shown(x['high'])}", x["verdict"])
            for x in self.lines
        ]  # fmt: skip
        head = ("figure", "published", "ours", f"95 %, {len(self.seeds)} seeds", "verdict")
        return f"{markdown_table(head, rows)}\n\n{self.finding} ({self.preset}): {self.verdict}"


def run_finding(name: str, preset: str, seeds: int, *, progress: bool = True) -> Result:
    """Measures a finding with the seeds 0, 1, ..., and returns its Result.

    Raises: ValueError for an unknown finding or preset, and for fewer than 3 or more than 10 seeds.
    """
    finding: Finding = find("findings", name)()
    if not LEAST_SEEDS <= seeds <= MOST_SEEDS:
        raise ValueError(f"--seeds must be 3 to 10, got {seeds}; an interval needs three")
    if preset not in finding.presets:
        raise ValueError(f"{name} has no preset {preset!r}; it has {', '.join(finding.presets)}")
    settings, began = finding.presets[preset], time.monotonic()
    with Progress(seeds * finding.steps(settings), f"measuring {name}", "steps", enabled=progress) as show:
        measured = [finding.measure(settings, seed, show.advance) for seed in range(seeds)]
    by_key = {key: [one.values[key] for one in measured] for key in measured[0].values}
    lines = [line_of(one, by_key.pop(one.key)) for one in finding.published]
    return Result(
        str(same_name(name, available("findings"))), finding.paper, preset, asdict(settings), list(range(seeds)),
        lines, overall([line["verdict"] for line in lines]),
        {key: [_rounded(value) for value in values] for key, values in by_key.items()}, measured[0].points,
        _machine(), round(time.monotonic() - began, 1),
    )  # fmt: skip


def line_of(one: Published, values: Sequence[float]) -> dict[str, Any]:
    """Returns a line of `Result.lines`: a published figure, what we measured by seed, and the verdict."""
    rounded = [_rounded(value) for value in values]
    defined = [value for value in rounded if value is not None]
    ours, low, high = interval(defined) if len(defined) > 1 else (mean(defined) if defined else None, None, None)
    verdict = one.verdict([float("nan") if value is None else value for value in rounded])
    return dict(key=one.key, text=one.text, published=one.shown, ours=ours, low=low, high=high, values=rounded,
                verdict=verdict)  # fmt: skip


def judged_again(result: Result) -> Result:
    """Returns a stored result with the figures and the verdicts of today's rule: nothing is measured.

    Raises: ValueError if a line was not measured then.
    """
    finding: Finding = find("findings", result.finding)()
    values = {line["key"]: line["values"] for line in result.lines} | result.extra
    if missing := [one.key for one in finding.published if one.key not in values]:
        raise ValueError(f"{result.finding} was stored without {', '.join(missing)}; measure it again")
    lines = [
        line_of(one, [float("nan") if value is None else value for value in values.pop(one.key)])
        for one in finding.published
    ]
    return replace(result, lines=lines, verdict=overall([line["verdict"] for line in lines]), extra=values)


def _rounded(value: float) -> float | None:
    """Returns a value with six decimals, or four significant digits if it is small; None if it is not defined."""
    return float(f"{value:.4g}") if 0 < abs(value) < 0.01 else round(value, 6) if isfinite(value) else None


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


def shown(value: float | None) -> str:
    """Returns a number with three significant digits, without an exponent."""
    if value is None or not isfinite(value):
        return "not defined"
    decimals = 2 - floor(log10(abs(value))) if value else 2
    return f"{value:.{max(decimals, 0)}f}"


def undefined(line: dict[str, Any]) -> str:
    """Returns in how many seeds a line of a result is not defined, as text after `shown`; "" if it is in all."""
    number = line["values"].count(None)
    begin = " in" if line["ours"] is None else "; not defined in"
    return f"{begin} {number} of {len(line['values'])} seeds" if number else ""
