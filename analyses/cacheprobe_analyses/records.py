"""Results as JSON: tables as records that it can hold, and files that are written whole."""

import json
from pathlib import Path
from typing import Any

import pandas as pd

DIGITS = 4


def records_of(table: pd.DataFrame) -> list[dict[str, Any]]:
    """A line each, numbers rounded to four digits behind the point, None where nothing is known."""
    rounded = table.round(DIGITS).astype(object)
    return rounded.where(rounded.notna(), None).to_dict("records")


def write_json(path: Path, held: Any) -> None:
    """Write JSON so that the file is the old one or the new one, whatever happens."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(held, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)
