"""Write the stored results as tables into docs/tables/, which the pages include, and draw the findings' figures.

python scripts/write_tables.py
"""

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "tables"


def tables() -> dict[str, str]:
    """Returns by name of its file: the text of every table."""
    found: dict[str, str] = {}
    for script in sorted((ROOT / "scripts" / "tables").glob("*.py")):
        found |= runpy.run_path(str(script))["tables"]()
    return {name: f"{text}\n" for name, text in found.items()}


if __name__ == "__main__":
    runpy.run_path(str(ROOT / "scripts/tables/findings.py"))["draw"]()
    for name, text in tables().items():
        (FOLDER / f"{name}.txt").write_text(text, encoding="utf-8")
