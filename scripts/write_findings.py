"""Write the stored results of `cacheprobe findings` into the pages docs/finding-*.md, and draw their figures.

python scripts/write_findings.py
"""

from pathlib import Path

from cacheprobe.core.registry import find
from cacheprobe_analyses.findings.finding import NO_FIGURE
from cacheprobe_analyses.findings.run import shown, stored
from cacheprobe_analyses.records import fill_page, markdown_table

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 900


def table(name: str) -> str:
    """Returns the lines of a stored result that have a verdict, in short; or that none is stored."""
    result = stored(name, ROOT / "analyses" / "results")
    if result is None:
        return "No result is stored yet."
    rows = [
        (x["text"], x["published"], f"{shown(x['ours'])} ± {shown(x['high'] - x['ours'])}",
         x["verdict"].partition(",")[0])
        for x in result.lines if x["verdict"] != NO_FIGURE
    ]  # fmt: skip
    head = ("figure", "published", f"ours ± 95 %, {len(result.seeds)} seeds", "verdict")
    return f"Preset {result.preset}: {result.verdict}.\n\n{markdown_table(head, rows)}"


def page(text: str) -> str:
    """Returns a page with the table of the finding that its marks name."""
    name = text.split("<!-- ")[1].split(":")[0]
    return fill_page(text, "write_findings.py", {name: table(name)})


if __name__ == "__main__":
    for path in sorted((ROOT / "docs").glob("finding-*.md")):
        path.write_text(page(path.read_text(encoding="utf-8")), encoding="utf-8")
        name = path.stem.removeprefix("finding-")
        if (result := stored(name)) is not None:
            figure = find("findings", name)().figure(result.points).update_layout(width=WIDTH)
            figure.write_image(path.with_suffix(".png"))
