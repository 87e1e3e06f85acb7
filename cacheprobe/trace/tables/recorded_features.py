"""Joins the features that a run recorded with its rows. Imports no torch, for the dashboard."""

import pandas as pd

from cacheprobe.core.values import JsonDict
from cacheprobe.trace.tables.schema import TABLES, typed

FEATURE_COLUMNS = tuple(TABLES["Trace.features"])
ROW_COLUMNS = FEATURE_COLUMNS[: FEATURE_COLUMNS.index("layer")]


def recorded_lines(rows: pd.DataFrame, found: pd.DataFrame, about: JsonDict) -> pd.DataFrame:
    """Returns recorded features with the columns FEATURE_COLUMNS. found: row, rank, feature and activation.  about:
    the capture settings' description of the dictionary."""
    merged = rows[list(ROW_COLUMNS)].merge(found, on="row")
    return typed(merged.assign(layer=about["layer"], site=about["site"]), "Trace.features")
