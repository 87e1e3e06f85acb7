"""Implements `cacheprobe findings`: lists published results and measures them again. Heavy imports are made when a
command runs."""

from pathlib import Path

from cyclopts import App

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


@findings.command
def run(
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
