"""Lists states as Arrow record batches, one line for each state, and writes them as Parquet files."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, SupportsIndex

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from cacheprobe.analysis.exports.arrays import NO_STATES, as_numpy, require_unused
from cacheprobe.core.files import write_whole
from cacheprobe.core.hook_names import CONVENTION
from cacheprobe.core.records import STATUSES
from cacheprobe.core.terminal import Progress
from cacheprobe.core.values import hint
from cacheprobe.trace.state_store import layer_number
from cacheprobe.trace.tables.schema import arrow_schema, typed

if TYPE_CHECKING:
    from datasets import Dataset

    from cacheprobe.trace.trace import Trace

_LINE = "states"
"""Name of the schema of a line but for its vector, whose numbers have the dtype of the states."""


class ChosenStates:
    """Says which states are exported: those of these sites, layers, requests and statuses that were captured."""

    def __init__(
        self,
        trace: "Trace",
        sites: "str | Sequence[str] | None" = None,
        layers: "SupportsIndex | Sequence[SupportsIndex] | None" = None,
        requests: "SupportsIndex | Sequence[SupportsIndex] | None" = None,
        statuses: "str | Sequence[str] | None" = None,
    ) -> None:
        """None is all that was captured, for `statuses` too.

        Raises: ValueError for a site or layer that was not captured, an unknown status, and for a run without states;
        KeyError for an unknown request.
        """
        if not trace.store.sites:
            raise ValueError(NO_STATES)
        self.trace = trace
        self.sites = tuple(dict.fromkeys(trace.store.sites if sites is None else sites))
        given = _numbers(trace.store.layers if layers is None else layers)
        self.layers = list(dict.fromkeys(layer_number(layer, trace.row_table) for layer in given))
        self.requests = list(dict.fromkeys(_numbers(list(trace.tokens) if requests is None else requests)))
        wanted = (statuses,) if isinstance(statuses, str) else STATUSES if statuses is None else statuses
        self.statuses = tuple(dict.fromkeys(wanted))
        for name in ("sites", "layers", "requests", "statuses"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty, so there is nothing to export; leave it out for all")
        for site in self.sites:
            if site not in trace.store.sites:
                raise ValueError(f"site {site!r} was not captured; this run kept {', '.join(trace.store.sites)}")
        for layer in self.layers:
            if layer not in trace.store.layers:
                raise ValueError(f"layer {layer} was not captured; this run kept layers {list(trace.store.layers)}")
        for status in self.statuses:
            if status not in STATUSES:
                raise ValueError(
                    f"unknown status {status!r}; statuses are {', '.join(STATUSES)}{hint(status, STATUSES)}"
                )
        for request in self.requests:
            trace.rows(request)

    def batches(self, request: int) -> Iterator[pa.RecordBatch]:
        """Yields one batch for each layer and site: the captured states of a request, by row. Reads one batch's states
        at a time."""
        rows = self.trace.rows(request)
        kept = rows[rows.status.isin(self.statuses) & (rows.state_index >= 0)]
        for layer in self.layers:
            of_layer = kept[kept.num_layers > layer]
            for site in self.sites:
                yield self._batch(of_layer, site, layer)

    def _batch(self, rows: pd.DataFrame, site: str, layer: int) -> pa.RecordBatch:
        vectors = as_numpy(self.trace.vectors(site, layer, rows))
        about = pa.RecordBatch.from_pandas(
            rows.assign(site=site, layer=layer), arrow_schema(_LINE), preserve_index=False
        )
        flat = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1])
        return about.append_column("vector", flat)

    def table(self) -> pa.Table:
        """Returns all chosen states as one Arrow table, in memory."""
        return pa.Table.from_batches([batch for request in self.requests for batch in self.batches(request)])

    def write_parquet(self, folder: Path, progress: bool = True) -> list[Path]:
        """Writes states-REQUEST.parquet for each request into a folder, which is created, and returns the paths. Holds
        one batch in memory. A file that is being written replaces an earlier one when it is whole."""
        require_unused(folder, "states-*.parquet")
        paths = []
        with Progress(len(self.requests), "writing", "requests", enabled=progress) as bar:
            for request in self.requests:
                paths.append(write_whole(folder / f"states-{request:05d}.parquet", partial(self._write, request)))
                bar.advance()
        return paths

    def _write(self, request: int, path: Path) -> None:
        batches = self.batches(request)
        first = next(batches)
        named = {"layers": ",".join(map(str, self.layers)), "convention": CONVENTION}
        with pq.ParquetWriter(path, first.schema.with_metadata(named)) as writer:
            writer.write_batch(first)
            for batch in batches:
                writer.write_batch(batch)


def _numbers(given: "SupportsIndex | Sequence[SupportsIndex]") -> list[int]:
    """Returns one whole number or several, such as an array of them, as a list."""
    return [index(one) for one in given] if isinstance(given, Iterable) else [index(given)]


def to_dataframe(
    trace: "Trace",
    sites: "str | Sequence[str] | None" = None,
    layers: "SupportsIndex | Sequence[SupportsIndex] | None" = None,
    requests: "SupportsIndex | Sequence[SupportsIndex] | None" = None,
    statuses: "str | Sequence[str] | None" = None,
) -> pd.DataFrame:
    """Returns captured states as a DataFrame, one line for each; rows of rejected drafts are included.

    sites, layers, requests, statuses: only these; None for all that were captured.
    Columns: row, request_id, step, phase, status, position, token_id, token (the row's input token), site, layer, and
    vector, an array [m]; bfloat16 states as float32.
    Raises: ValueError for a site, layer or status that the run does not have; KeyError for an unknown request.
    """
    table = ChosenStates(trace, sites, layers, requests, statuses).table()
    frame = typed(table.drop_columns(["vector"]).to_pandas(), _LINE)
    vectors = [chunk.flatten().to_numpy().reshape(-1, chunk.type.list_size) for chunk in table["vector"].chunks]
    frame["vector"] = [vector for chunk in vectors for vector in chunk]
    return frame


def to_datasets(
    trace: "Trace",
    sites: "str | Sequence[str] | None" = None,
    layers: "SupportsIndex | Sequence[SupportsIndex] | None" = None,
    requests: "SupportsIndex | Sequence[SupportsIndex] | None" = None,
    statuses: "str | Sequence[str] | None" = None,
) -> "Dataset":
    """Returns captured states as a Dataset of Hugging Face's library datasets, in memory. Arguments, columns and errors
    are those of `to_dataframe`. `cacheprobe export` writes the same as Parquet files, request by request.
    """
    from datasets import Dataset

    return Dataset(ChosenStates(trace, sites, layers, requests, statuses).table())
