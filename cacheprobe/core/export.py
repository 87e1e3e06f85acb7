"""Filters the table of lens readings (hypotheses) and writes it to a CSV or Parquet file."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from cacheprobe.core.files import write_whole

ENDINGS = (".csv", ".parquet")
_FILTERS = {"request": "request_id", "layer": "layer", "site": "site", "status": "status", "lens": "lens"}


def select_hypotheses(hypotheses: pd.DataFrame, **wanted: Sequence[object]) -> pd.DataFrame:
    """Returns the lines of the table `hypotheses` (one for each lens reading) that pass every filter, with a new index.
    Filters: request, layer, site, status and lens, each a list of allowed values; an empty list allows all.

    Raises: ValueError for a value that no reading has, and if no reading passes all filters.
    """
    chosen = hypotheses
    for name, values in wanted.items():
        column = _FILTERS[name]
        present = hypotheses[column].unique().tolist()
        for value in values:
            if value not in present:
                raise ValueError(f"no reading of {name} {value!r}; this run has {', '.join(map(str, sorted(present)))}")
        if values:
            chosen = chosen[chosen[column].isin(list(values))]
    if chosen.empty:
        filters = ", ".join(f"{name} {' or '.join(map(str, values))}" for name, values in wanted.items() if values)
        raise ValueError(f"no reading fits {filters or 'an empty table'} all at once; drop one of the filters")
    return chosen.reset_index(drop=True)


def require_ending(path: Path) -> None:
    """Checks the ending of a table's file name. Raises: ValueError unless it is .csv or .parquet."""
    if path.suffix not in ENDINGS:
        raise ValueError(f"{path} ends in {path.suffix or 'nothing'}; a table is written as {' or '.join(ENDINGS)}")


def write_table(table: pd.DataFrame, path: Path) -> Path:
    """Writes a DataFrame to a .csv or .parquet file and returns the path; after an error the earlier file is unchanged.
    CSV stores lists (columns top_...) as JSON.

    Raises: ValueError for another ending.
    """
    require_ending(path)
    if path.suffix == ".parquet":
        return write_whole(path, lambda temporary: table.to_parquet(temporary, index=False))
    lists = [name for name in table.columns if name.startswith("top_")]
    flat = table.assign(**{name: [_listed(value) for value in table[name]] for name in lists})
    return write_whole(path, lambda temporary: flat.to_csv(temporary, index=False))


def _listed(value: object) -> str | None:
    """Returns a list, tuple or array as JSON text; None for any other value."""
    if not isinstance(value, list | tuple | np.ndarray):
        return None
    return json.dumps([one.item() if isinstance(one, np.generic) else one for one in value])
