"""Tables and figures of the stored results of `cacheprobe findings`, judged by today's rule."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from cacheprobe.core.files import write_json
from cacheprobe.core.registry import available
from cacheprobe_analyses.findings.finding import NO_FIGURE, is_judged
from cacheprobe_analyses.findings.run import judged_again, shown, stored, undefined
from cacheprobe_analyses.records import markdown_table

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 900


def table(name: str) -> str:
    """Returns two tables of a stored result: the lines with a verdict, and those without; or that none is stored."""
    result = stored(name, ROOT / "analyses" / "results")
    if result is None:
        return "No result is stored yet."
    ours = f"ours ± 95 %, {len(result.seeds)} seeds"
    judged = [(*_cells(x), x["verdict"]) for x in result.lines if is_judged(x["verdict"])]
    others = [
        (*_cells(x), "" if x["verdict"] == NO_FIGURE else x["verdict"])
        for x in result.lines if not is_judged(x["verdict"])
    ]  # fmt: skip
    parts = [f"Preset {result.preset}: {result.verdict}."]
    if judged:
        parts.append(markdown_table(("figure", "published", ours, "verdict"), judged))
    return "\n\n".join([*parts, "Without a verdict:", markdown_table(("figure", "published", ours, "why"), others)])


def _cells(line: dict[str, Any]) -> tuple[str, str, str]:
    """Returns the figure, what was published, and what we measured with its interval."""
    if line["low"] is None:
        return line["text"], line["published"], f"{shown(line['ours'])}{undefined(line)}"
    spread = shown(line["high"] - line["ours"])
    return line["text"], line["published"], f"{shown(line['ours'])} ± {spread}{undefined(line)}"


def tables() -> dict[str, str]:
    """Returns by name: the table of each finding."""
    return {f"finding-{name}": table(name) for name in available("findings")}


def draw() -> None:
    """Judges the stored results by today's rule and stores them, and draws their figures beside the pages."""
    for name, finding in available("findings").items():
        if (result := stored(name)) is not None:
            result = judged_again(result)
            write_json(ROOT / "analyses" / "results" / f"{name}.json", asdict(result), indent=None)
            figure = finding().figure(result.points).update_layout(width=WIDTH)
            figure.write_image(ROOT / "docs" / f"finding-{name}.png")
