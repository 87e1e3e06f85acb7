"""Measures what the layers said of each token of a run, for all tokens at once, from the lens readings of the rows that
predict them."""

from typing import NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa

from cacheprobe.trace.tables.draft_verdicts import NOT_DRAFTED
from cacheprobe.trace.tables.schema import typed

READ_COLUMNS = (
    "layer", "entropy_nats", "committed_token_id", "committed_logprob_nats", "top_token_ids", "top_logprob_nats"
)  # fmt: skip
"""Columns of the lens readings that are needed, besides request_id and position of the row."""
_GROUPS = ("accepted", "rejected", NOT_DRAFTED)
_NONE, _FAR = -1, np.iinfo(np.int64).max


class _Readings(NamedTuple):
    """Holds n lens readings of m rows, sorted by row and layer, as arrays."""

    keys: np.ndarray
    """[m]: request and position of the token that the row predicts, as one number."""
    starts: np.ndarray
    """[m]: index of the row's first reading."""
    counts: np.ndarray
    """[m]: number of its readings."""
    layer: np.ndarray
    first: np.ndarray
    """[n]: id of the most likely token."""
    is_right: np.ndarray
    """[n]: whether that is the committed token."""
    logprob: np.ndarray
    """[n]: its log-probability."""
    second: np.ndarray
    """[n]: log-probability of the second most likely token; NaN if it was not kept."""
    committed: np.ndarray
    """[n]: log-probability of the committed token."""
    entropy: np.ndarray

    @classmethod
    def of(cls, table: pa.Table, width: int) -> "_Readings":
        """Returns the readings of an Arrow table, as `add_readings` takes it. width: more than the largest position."""
        request, position, layer, entropy = (
            table[name].to_numpy() for name in ("request_id", "position", "layer", "entropy_nats")
        )
        target = table["committed_token_id"].to_pandas().fillna(_NONE).to_numpy(dtype=np.int64)
        keys = request * width + position + 1
        order = np.lexsort((layer, keys))
        first = _choice(table["top_token_ids"], 0, _NONE)
        columns = (layer, first, first == target, _choice(table["top_logprob_nats"], 0, np.nan),
                   _choice(table["top_logprob_nats"], 1, np.nan),
                   table["committed_logprob_nats"].to_pandas().to_numpy(dtype=np.float32), entropy)  # fmt: skip
        keys = keys[order]
        starts = np.flatnonzero(np.append(True, keys[1:] != keys[:-1]))
        counts = np.diff(np.append(starts, len(keys)))
        return cls(keys[starts], starts, counts, *(column[order] for column in columns))

    @property
    def last(self) -> np.ndarray:
        """[m]: index of the row's last reading."""
        return self.starts + self.counts - 1

    def measures(self) -> dict[str, np.ndarray]:
        """Returns arrays [m] by the names of the columns that `add_readings` adds; -1 or NaN for an unknown value."""
        layer, first, last, starts = self.layer, self.first, self.last, self.starts
        differs, index = first != np.repeat(first[last], self.counts), np.arange(len(first))
        nats = np.where(differs, self.logprob, -np.inf)
        most = np.maximum.reduceat(nats, starts)
        most_at = np.minimum.reduceat(np.where(nats == np.repeat(most, self.counts), index, len(first)), starts)
        latest = np.maximum.reduceat(np.where(differs, index, _NONE), starts)
        lowest = np.minimum.reduceat(np.where(self.is_right, layer, _FAR), starts)
        rival = np.where(self.is_right[last], self.second[last], self.logprob[last])
        disagrees = most > -np.inf
        return {
            "prediction_depth": layer[np.where(latest < starts, starts, latest + 1)],
            "first_at_layer": np.where(lowest == _FAR, _NONE, lowest),
            "disagreement": np.exp(most.astype(np.float64)),
            "disagreement_layer": np.where(disagrees, layer[most_at], _NONE),
            "disagreement_token_id": np.where(disagrees, first[most_at], _NONE),
            "entropy_nats": self.entropy[last],
            "margin_nats": self.committed[last] - rival,
        }

    def first_at(self, rows: np.ndarray, layers: np.ndarray) -> np.ndarray:
        """Returns whether each of these rows has the committed token first at this layer, as an array of True, False
        and, if it has no reading there, None. rows: indices, -1 for none.  layers: -1 for none."""
        width = int(self.layer.max()) + 2
        keys = np.repeat(np.arange(len(self.starts)), self.counts) * width + self.layer
        wanted = rows * width + layers
        at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        found = np.where(self.is_right[at], True, False).astype(object)
        found[(rows < 0) | (layers < 0) | (layers >= width) | (keys[at] != wanted)] = None
        return found

    def by_layer(self, rows: np.ndarray, lines: pd.DataFrame) -> pd.DataFrame:
        """Returns `RunTokens.layers`. rows: index of each line's row, -1 for none."""
        group, drafted = np.full(len(self.starts), _NONE), np.full(len(self.starts), _NONE)
        is_kept = (rows >= 0) & (lines.verdict != "rejected").to_numpy()
        verdict = lines.verdict.to_numpy()[is_kept]
        group[rows[is_kept]] = np.select([verdict == "accepted", verdict == "recovered"], [0, 1], 2)
        drafted[rows[is_kept]] = lines.drafted_token_id.to_numpy()[is_kept]
        group, drafted = np.repeat(group, self.counts), np.repeat(drafted, self.counts)
        is_counted, size = group >= 0, 3 * (int(self.layer.max()) + 1)
        cell = (3 * self.layer + group)[is_counted]
        counts, right, draft = (
            np.bincount(cell, weights, size)
            for weights in (None, self.is_right[is_counted], (self.first == drafted)[is_counted])
        )
        known = np.flatnonzero(counts)
        table = pd.DataFrame({"layer": known // 3, "verdict": np.array(_GROUPS, dtype=object)[known % 3]})
        shares = {"rows": counts[known], "committed_first": right[known] / counts[known]}
        drafted_first = np.where(known % 3 == 1, draft[known] / counts[known], np.nan)
        return typed(table.assign(**shares, drafted_first=drafted_first), "layers of tokens")


def add_readings(lines: pd.DataFrame, readings: pa.Table, drafter_layer: int) -> pd.DataFrame:
    """Adds the columns that need lens readings to the lines of a token table. Returns `RunTokens.layers`.

    lines: with missing numbers as -1.  readings: of the rows of status "committed", one lens and site, at least one,
    with the columns request_id, position and READ_COLUMNS.  drafter_layer: of the run; -1 for none.
    """
    request, position = lines.request_id.to_numpy(), lines.position.to_numpy()
    width = max(int(readings["position"].to_numpy().max()) + 1, int(position.max())) + 1
    read, keys = _Readings.of(readings, width), request * width + position
    at = np.minimum(np.searchsorted(read.keys, keys), len(read.keys) - 1)
    rows = np.where((read.keys[at] == keys) & (lines.committed_token_id >= 0).to_numpy(), at, _NONE)
    for name, values in read.measures().items():
        lines[name] = np.where(rows >= 0, values[at], _NONE if values.dtype.kind == "i" else np.nan)
    own = lines.drafter_layer.to_numpy()
    lines["first_at_drafter_layer"] = read.first_at(rows, np.where(own >= 0, own, drafter_layer))
    return read.by_layer(rows, lines)


def _choice(lists: pa.ChunkedArray, place: int, missing: float) -> np.ndarray:
    """Returns the number at a place in each list of a column; `missing` for a list that is too short, or null."""
    column = lists.combine_chunks()
    chunk = column if isinstance(column, pa.ListArray) else pa.concat_arrays(column.chunks)
    values, offsets = chunk.values.to_numpy(), chunk.offsets.to_numpy().astype(np.int64)
    found = np.full(len(chunk), missing, dtype=values.dtype if len(values) else None)
    is_there = offsets[:-1] + place < offsets[1:]
    found[is_there] = values[offsets[:-1][is_there] + place]
    return found
