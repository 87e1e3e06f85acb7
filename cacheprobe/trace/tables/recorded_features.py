"""Joins the features that a run recorded with its rows. Imports no torch, for the dashboard."""

import pandas as pd

from cacheprobe.core.values import JsonDict

ROW_COLUMNS = ("row", "request_id", "step", "phase", "position", "status", "token_id", "token")
FEATURE_COLUMNS = (*ROW_COLUMNS, "layer", "site", "rank", "feature", "activation")


def recorded_lines(rows: pd.DataFrame, found: pd.DataFrame, about: JsonDict) -> pd.DataFrame:
    """Returns recorded features with the columns FEATURE_COLUMNS. found: row, rank, feature and activation.  about:
    the capture settings' description of the dictionary."""
    merged = rows[list(ROW_COLUMNS)].merge(found, on="row")
    return merged.assign(layer=about["layer"], site=about["site"])[list(FEATURE_COLUMNS)]
