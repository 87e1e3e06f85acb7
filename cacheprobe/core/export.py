"""Filters the table of lens readings (hypotheses) and writes it to a CSV or Parquet file."""

import json
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
from pyarrow import csv

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


def write_table(table: pd.DataFrame, path: Path, schema: "pa.Schema | None" = None) -> Path:
    """Writes a DataFrame to a .csv or .parquet file and returns the path; after an error the earlier file is unchanged.

    Texts such as "null" and "007" in a .csv file are read as they are with
    `pd.read_csv(path, keep_default_na=False, na_values=[""], dtype={"token": "str"})`.
    schema: Arrow types of a Parquet file; by default those that Arrow finds in the values.
    Raises: ValueError for another ending.
    """
    require_ending(path)
    if path.suffix == ".parquet":
        return write_whole(path, lambda temporary: table.to_parquet(temporary, index=False, schema=schema))
    return write_whole(path, lambda temporary: write_csv(table, temporary))


def write_csv(table: pd.DataFrame, to: "Path | BytesIO") -> None:
    """Writes a DataFrame as CSV: texts in quotes, lists as JSON in quotes, and nothing for a missing value."""
    columns = {str(name): _printable(column) for name, column in table.items()}
    csv.write_csv(pa.Table.from_pandas(pd.DataFrame(columns, table.index), preserve_index=False), to)


def _printable(column: pd.Series) -> pd.Series:
    """Returns a column with durations, and objects of any kind, as text."""
    if column.dtype.kind not in "Om" or isinstance(column.dtype, pd.StringDtype):
        return column
    texts = [None if is_null else cell_text(cell) for cell, is_null in zip(column, column.isna(), strict=True)]
    return pd.Series(texts, column.index, dtype="str")


def cell_text(value: object) -> str:
    """Returns a value as text: a list, array or dict as JSON."""
    if isinstance(value, list | tuple | dict | np.ndarray):
        return json.dumps(value, ensure_ascii=False, default=_plain)
    return str(value)


def _plain(value: object) -> object:
    """Returns a value of numpy as one that JSON has. Raises: TypeError for any other value."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"no JSON of {type(value).__name__}")
