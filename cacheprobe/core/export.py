"""The hypotheses table, filtered, as a file for other programs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from cacheprobe.core.files import write_whole

ENDINGS = (".csv", ".parquet")
_FILTERS = {"request": "request_id", "layer": "layer", "site": "site", "status": "status", "lens": "lens"}


def select_hypotheses(hypotheses: pd.DataFrame, **wanted: Sequence[object]) -> pd.DataFrame:
    """The readings that fit every filter: request, layer, site, status, lens, each a list of which one must hold.

    An empty list asks for nothing.
    Raises: ValueError for a value that no reading has, and where no reading fits all of them.
    """
    chosen = hypotheses
    for name, values in wanted.items():
        column = _FILTERS[name]
        there = hypotheses[column].unique().tolist()
        for value in values:
            if value not in there:
                raise ValueError(f"no reading of {name} {value!r}; this run has {', '.join(map(str, sorted(there)))}")
        if values:
            chosen = chosen[chosen[column].isin(list(values))]
    if chosen.empty:
        said = ", ".join(f"{name} {' or '.join(map(str, values))}" for name, values in wanted.items() if values)
        raise ValueError(f"no reading fits {said or 'an empty table'} all at once; drop one of the filters")
    return chosen.reset_index(drop=True)


def require_ending(path: Path) -> None:
    """Raises: ValueError for a file that is neither .csv nor .parquet."""
    if path.suffix not in ENDINGS:
        raise ValueError(f"{path} ends in {path.suffix or 'nothing'}; a table is written as {' or '.join(ENDINGS)}")


def write_table(table: pd.DataFrame, path: Path) -> Path:
    """Write a table as .csv or .parquet, whole or not at all. In CSV, lists are written as JSON.

    Raises: ValueError for another ending.
    """
    require_ending(path)
    if path.suffix == ".parquet":
        return write_whole(path, lambda beside: table.to_parquet(beside, index=False))
    lists = [name for name in table.columns if name.startswith("top_")]
    flat = table.assign(**{name: [_listed(value) for value in table[name]] for name in lists})
    return write_whole(path, lambda beside: flat.to_csv(beside, index=False))


def _listed(value: Any) -> str | None:
    """A list as JSON; a thought has none."""
    return json.dumps([_plain(number) for number in value]) if pd.api.types.is_list_like(value) else None


def _plain(number: Any) -> object:
    return number.item() if hasattr(number, "item") else number
