"""Builds the table of the experts that computed each row, of rolled-back rows too."""

from collections.abc import Iterable
from operator import index
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from cacheprobe.core.hook_names import ROUTER
from cacheprobe.trace.tables.build import ROW_COLUMNS
from cacheprobe.trace.tables.schema import typed

if TYPE_CHECKING:
    from cacheprobe.trace.trace import Trace


def routing(
    trace: "Trace", layers: "int | Iterable[int] | None" = None, rows: pd.DataFrame | None = None
) -> pd.DataFrame:
    """Returns a DataFrame with one line for each row, layer and expert: which experts computed the row's token.

    Columns: row, request_id, step, phase, position, status, token_id, token; layer; rank, 0 for the largest weight;
    expert, counted from 0; weight, with which the expert's output is added, as the model's router normalises it.
    layers: one or several; None for all captured layers with experts.
    rows: a table from `trace.rows()`; None for all rows with states. Rows whose pass ended below a layer have no line.
    Raises: ValueError if the run did not capture routing, or a layer has no experts.
    Twin: tests.experts.slowly.routing_slowly: the same experts, weights close(1e-5) in float32.
    """
    table = trace.row_table if rows is None else rows
    table = table[table.state_index >= 0] if rows is None else table
    given = [] if layers is None else layers if isinstance(layers, Iterable) else [layers]
    listed = None if layers is None else [index(layer) for layer in given]
    parts = []
    for layer in trace.store.layers if listed is None else listed:
        ran = table[table.num_layers > layer] if layer >= 0 else table
        number, _ = trace.state_indices(ROUTER, layer, ran)  # raises an error that names what was not kept
        part = _lines(trace, number, ran)
        if part.empty and len(ran) and listed is not None:
            raise ValueError(f"layer {layer} of {trace.fingerprint['model']} has no experts; leave out layers=")
        parts.append(part)
    return pd.concat(parts, ignore_index=True) if parts else typed([], "routing")


def _lines(trace: "Trace", layer: int, rows: pd.DataFrame) -> pd.DataFrame:
    """Returns the lines of one layer; none for a layer without experts, whose routing is NaN."""
    kept = trace.vectors(ROUTER, layer, rows).numpy() if len(rows) else np.empty((0, 0, 2), dtype=np.float32)
    row_index, rank = np.nonzero(~np.isnan(kept[..., 0]))
    table = rows.iloc[row_index][list(ROW_COLUMNS)].reset_index(drop=True)
    chosen = kept[row_index, rank]
    return typed(table.assign(layer=layer, rank=rank, expert=chosen[:, 0], weight=chosen[:, 1]), "routing")
