"""Builds a trace's table of features: the largest activations of a dictionary at each row, rolled-back rows too."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, SupportsIndex

import pandas as pd
import torch
from torch import Tensor

from cacheprobe.core.values import whole_number
from cacheprobe.lenses.dictionaries import Dictionary, DictionaryError
from cacheprobe.trace.tables.build import active_features, recorded_lines

if TYPE_CHECKING:
    from cacheprobe.trace.data import TraceData

_ROWS_AT_ONCE = 4096


def features_of(
    trace: "TraceData",
    dictionary: Dictionary,
    top: int,
    rows: "pd.DataFrame | None",
    site: str | None,
    layer: SupportsIndex | None,
    include_special: bool,
) -> pd.DataFrame:
    """Returns the table of `Trace.features`, computed from the captured states. Arguments and errors as there.

    Twin: what `Dictionary.encode` says of each state by itself, in tests.dictionaries.test_features.
    """
    top = whole_number("top", top, at_least=1)
    site, layer_number, chosen = place_of_features(trace, dictionary, rows, site, layer, include_special)
    found = [dictionary.top(states, top) for states in states_to_encode(trace, dictionary, site, layer_number, chosen)]
    active = active_features(chosen.row.to_numpy(), *(torch.cat(parts) for parts in zip(*found, strict=True)))
    return recorded_lines(chosen, active, {"site": site, "layer": layer_number})


def states_to_encode(
    trace: "TraceData", dictionary: Dictionary, site: str, layer: int, rows: pd.DataFrame
) -> Iterator[Tensor]:
    """Yields the states of rows, some at once: [n, m], those of all heads joined. Raises: DictionaryError for states of
    another width than the dictionary encodes."""
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        states = trace.vectors(site, layer, rows.iloc[first : first + _ROWS_AT_ONCE]).flatten(1)
        dictionary.require_width(states.shape[1], f"site {site} of {trace.fingerprint['model']}")
        yield states


def place_of_features(
    trace: "TraceData",
    dictionary: Dictionary,
    rows: "pd.DataFrame | None",
    site: str | None,
    layer: SupportsIndex | None,
    include_special: bool,
) -> tuple[str, int, pd.DataFrame]:
    """Returns (site, layer, rows) of the states that a dictionary reads. rows: None for all with states there.
    include_special: False leaves out the rows that `trace.is_special` names.

    Raises: DictionaryError if the dictionary's hook point is none of a trace's; ValueError if there are no such rows.
    """
    place = dictionary.config.place or (None, None)
    site, number = site or place[0], layer if layer is not None else place[1]
    if site is None or number is None:
        raise DictionaryError(
            f"this dictionary reads {dictionary.hook or 'an unnamed hook point'}, which no trace keeps; if its states "
            "are those of another site, say site= and layer="
        )
    chosen = rows
    if chosen is None:
        table = trace.row_table
        depth = int(number) if int(number) >= 0 else int(number) + int(table.num_layers.max())
        chosen = table[(table.state_index >= 0) & (table.num_layers > depth)]
    if not include_special:
        chosen = chosen[~trace.is_special(chosen)]
    layer_number, _ = trace.state_indices(site, number, chosen)  # raises an error that names what was not kept
    if chosen.empty:
        left_out = "" if include_special else " that is not of a first or special token; see include_special="
        raise ValueError(f"there is nothing to read: no row has states at this site and layer{left_out}")
    return site, layer_number, chosen


def recorded_features(
    trace: "TraceData",
    top: int,
    rows: "pd.DataFrame | None",
    site: str | None = None,
    layer: SupportsIndex | None = None,
    include_special: bool = False,
) -> pd.DataFrame:
    """Returns the table of `Trace.features` without a dictionary: the features that were recorded during the run. `top`
    above the number recorded gives all that were. Raises: ValueError if none were recorded, at another place, or
    without the special tokens that `include_special` asks for."""
    found, about = trace.feature_table, trace.meta["capture"].get("dictionary")
    if found is None or about is None:
        raise ValueError(
            "this run recorded no features; give the dictionary, or run with CaptureConfig(dictionary=...)"
        )
    top = whole_number("top", top, at_least=1)
    place = about["site"] if site is None else site, about["layer"] if layer is None else int(layer)
    if place != (about["site"], about["layer"]):
        raise ValueError(
            f"features were recorded at site {about['site']} of layer {about['layer']}, not at {place[0]} of {place[1]}"
        )
    chosen = trace.row_table if rows is None else rows
    if not include_special:
        chosen = chosen[~trace.is_special(chosen)]
    elif not trace.meta["capture"].get("include_special", True):
        raise ValueError(
            "this run left out features of first and special tokens; give the dictionary and states, or run with "
            "CaptureConfig(dictionary=..., include_special=True)"
        )
    return recorded_lines(chosen, found[found["rank"] < top], about)
