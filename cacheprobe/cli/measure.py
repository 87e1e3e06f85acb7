"""Implements `cacheprobe bench` and `cacheprobe findings`: lists, measures and compares benchmarks and published
results. Heavy imports are made only in a command.
"""

from importlib import import_module
from json import dumps, loads
from pathlib import Path
from types import ModuleType

from cyclopts import App

from cacheprobe.core.values import JsonDict

bench = App(name="bench", help="Measure, in one process, and print ratios of medians.", help_format="plaintext")


@bench.default
def measure(name: str | None = None, *, json: Path | None = None, rounds: int = 3, small: bool = False) -> None:
    """Measure a benchmark in one process, and print ratios of medians. Without a name, list the benchmarks.

    Parameters
    ----------
    name
        Name of the benchmark, such as main-job; "list", or no name, lists them.
    json
        Also write the numbers to this file.
    rounds
        Interleaved repetitions.
    small
        Run a small form that only shows that the benchmark works.
    """
    catalogue = _benchmarks_module("catalogue")
    if name in (None, "list"):
        for known, question in catalogue.questions().items():
            print(f"{known:14} {question}")
        return
    if rounds < 1:
        raise ValueError(f"--rounds {rounds} would measure nothing; give at least 1")
    run = catalogue.small(name) if small else catalogue.benchmark(name)
    numbers = dumps(run(rounds), indent=1)
    print(numbers)
    if json is not None:
        json.write_text(numbers + "\n")


@bench.command
def compare(old: Path, new: Path) -> int:
    """Compare two results of one benchmark; exit 1 if the second is worse beyond the noise of the rounds.

    Parameters
    ----------
    old
        A file written by cacheprobe bench NAME --json.
    new
        Another file of the same benchmark.
    """
    comparison = _benchmarks_module("compare")
    before, after = (_read_result(path) for path in (old, new))
    changes = comparison.compare(before, after)
    print(comparison.table(changes))
    for line in comparison.elsewhere(before, after):
        print(f"not the same: {line}")
    return int(any(change.verdict == "worse" for change in changes))


def _benchmarks_module(name: str) -> ModuleType:
    try:
        return import_module(f"cacheprobe_benchmarks.{name}")
    except ModuleNotFoundError as missing:
        if missing.name != "cacheprobe_benchmarks":
            raise
        raise ValueError("the benchmarks are not installed; run from a checkout with pip install -e .") from None


def _read_result(path: Path) -> JsonDict:
    try:
        return dict(loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path} cannot be read as a result of a benchmark: {error}") from None


findings = App(name="findings", help="List published results, or measure one again.", help_format="plaintext")


@findings.default
def listing() -> None:
    """List the findings: name, question, paper, and the verdict that is stored for each."""
    from cacheprobe.core import terminal
    from cacheprobe.core.registry import available
    from cacheprobe_analyses.findings.run import stored

    rows = []
    for name, finding in available("findings").items():
        result = stored(name)
        verdict = f"{result.verdict} ({result.preset})" if result else "none stored"
        rows.append((name, finding.question, finding.paper, verdict))
    note = "measure one again with cacheprobe findings run NAME"
    terminal.show([terminal.Listing("findings", ("name", "question", "paper", "verdict"), rows, note)])


@findings.command(name="run")
def measure_finding(
    name: str,
    *,
    preset: str = "small",
    seeds: int = 3,
    out: Path = Path("runs/findings"),
    progress: bool = True,
) -> None:
    """Measure a finding again: train or load, measure, judge, and write the table and the figure.

    Parameters
    ----------
    name
        Name of the finding, from `cacheprobe findings`.
    preset
        small (minutes), full, or tiny (seconds, for tests).
    seeds
        Seeds to measure with, at least 3.
    out
        Directory for NAME.json, NAME.md (the table) and NAME.html (the figure).
    progress
        Whether to show progress.
    """
    from cacheprobe_analyses.findings.run import run_finding, write

    result = run_finding(name, preset, seeds, progress=progress)
    print(result.table())
    for path in write(result, out):
        print(path)
