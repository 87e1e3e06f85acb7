"""Gives the states of a trace to other libraries: pandas, datasets, Parquet, numpy, xarray, speculators and
Neuronpedia."""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, SupportsIndex

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file
from torch import Tensor

from cacheprobe.core.files import write_whole
from cacheprobe.core.hook_names import CONVENTION, SITE_NAMES
from cacheprobe.core.records import STATUSES
from cacheprobe.core.terminal import Progress
from cacheprobe.core.values import JsonDict, folder, listed, whole_number
from cacheprobe.lenses.dictionaries import Dictionary
from cacheprobe.trace.state_store import layer_number
from cacheprobe.trace.tables.features import place_of_features, states_to_encode
from cacheprobe.trace.tables.schema import arrow_schema, typed

if TYPE_CHECKING:
    import xarray
    from datasets import Dataset

    from cacheprobe.trace.trace import Trace

NO_STATES = "this run kept no states at S, T or C; run it with capture='S' or more"


def as_numpy(states: Tensor) -> np.ndarray:
    """Returns a tensor as an array of the same numbers; bfloat16, which numpy does not have, as float32."""
    return (states.float() if states.dtype == torch.bfloat16 else states).contiguous().numpy()


def require_unused(folder: Path, pattern: str) -> None:
    """Creates a folder. Raises: ValueError if it holds files of an earlier export, which a reader would take for files
    of this one."""
    folder.mkdir(parents=True, exist_ok=True)
    if found := sorted(folder.glob(pattern)):
        raise ValueError(f"{folder} holds an earlier export, such as {found[0].name}; choose an empty folder")


def to_numpy(trace: "Trace", request_id: SupportsIndex) -> dict[str, np.ndarray]:
    """Returns site -> array [l, p, m] of the captured layers, in their order, and of the committed positions.

    Raises: ValueError if no site was captured, or the state of a position is missing; KeyError for an unknown request.
    """
    if not trace.store.sites:
        raise ValueError(NO_STATES)
    rows = trace.rows(request_id, "committed").sort_values("position")
    return {
        site: np.stack([as_numpy(trace.vectors(site, layer, rows)) for layer in trace.store.layers])
        for site in trace.store.sites
    }


def to_xarray(trace: "Trace", request_id: SupportsIndex) -> "xarray.Dataset":
    """Returns the arrays of `to_numpy` as variables with the dimensions layer, position and component.

    Coordinates: layer, position; token and token_id, by position.
    Raises: as `to_numpy`; ModuleNotFoundError without xarray, with the command that installs it.
    """
    try:
        import xarray
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("to_xarray needs xarray: pip install 'cacheprobe[exports]'") from error
    rows = trace.rows(request_id, "committed").sort_values("position")
    dimensions = ("layer", "position", "component")
    return xarray.Dataset(
        {
            site: (dimensions, array, {"long_name": SITE_NAMES[site]})
            for site, array in to_numpy(trace, request_id).items()
        },
        coords={
            "layer": list(trace.store.layers),
            "position": rows.position.to_numpy(),
            "token_id": ("position", rows.token_id.to_numpy()),
            "token": ("position", np.array(rows.token.tolist(), dtype=object)),
        },
        attrs={"model": str(trace.fingerprint["model"]), "request_id": int(request_id), "convention": CONVENTION},
    )


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
        given = listed(trace.store.layers if layers is None else layers)
        self.layers = list(dict.fromkeys(layer_number(index(layer), trace.row_table) for layer in given))
        given = listed(trace.tokens if requests is None else requests)
        self.requests = list(dict.fromkeys(index(request) for request in given))
        wanted = (statuses,) if isinstance(statuses, str) else STATUSES if statuses is None else statuses
        self.statuses = tuple(dict.fromkeys(wanted))
        for name in ("sites", "layers", "requests", "statuses"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty, so there is nothing to export; leave it out for all")
        for site in self.sites:
            if site not in trace.store.sites:
                raise ValueError(f"site {site!r} was not captured; this run kept {', '.join(trace.store.sites)}")
        for layer in self.layers:
            trace.state_indices(self.sites[0], layer, [])
        for request, status in product(self.requests, self.statuses):
            trace.rows(request, status)

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


FEWEST_LAYERS = 7
"""Of a model for which EAGLE-3's three layers are different."""


def to_speculators(
    trace: "Trace",
    folder: "str | Path",
    layers: Sequence[SupportsIndex] | None = None,
    progress: bool = True,
) -> list[Path]:
    """Writes hs_REQUEST.safetensors for each request into a folder, which is created, and returns the paths.

    A file has token_ids [t], of all tokens but the newest, which was not computed; and hidden_states [t, l, m], site S
    at `layers`, and last at the model's last layer, before its final norm. Its metadata names these layers, so that
    `cp.import_vllm` reads it without layers=.
    layers: by default 1, n/2 - 1 and n - 4 of n layers. vLLM, which counts the stream that enters a block, gives these
    to EAGLE-3 as layers 2, n/2 and n - 3.
    Source: github.com/vllm-project/speculators, check_hidden_states.
    Raises: ValueError for a run without S at one of these layers or positions, with tokens from a KVSnapshot, or with
    fewer than 7 layers if `layers` are not given; also for a folder with an earlier export.
    """
    n = int(trace.row_table.num_layers.max())
    if layers is None and n < FEWEST_LAYERS:
        raise ValueError(f"the model has {n} layers, too few for EAGLE-3's choice of three; give layers=")
    chosen = [layer_number(one, trace.row_table) for one in ((1, n // 2 - 1, n - 4) if layers is None else layers)]
    folder = Path(folder)
    require_unused(folder, "hs_*.safetensors")
    paths, named = [], {"layers": ",".join(map(str, (*chosen, n - 1))), "convention": CONVENTION}
    with Progress(len(trace.requests), "writing", "requests", enabled=progress) as bar:
        for request in trace.tokens:
            rows = trace.rows(request, "committed").sort_values("position")
            if rows.position.tolist() != list(range(len(rows))):
                raise ValueError(f"request {request} began from cached keys and values, whose states were not computed")
            states = torch.stack([trace.vectors("S", layer, rows) for layer in (*chosen, n - 1)], dim=1)
            tensors = {"token_ids": torch.tensor(rows.token_id.tolist()), "hidden_states": states.contiguous()}
            save = partial(save_file, tensors, metadata=named)
            paths.append(write_whole(folder / f"hs_{request}.safetensors", save))
            bar.advance()
    return paths


def to_neuronpedia(
    trace: "Trace",
    dictionary: Dictionary,
    features: Sequence[int],
    path: "str | Path | None" = None,
    *,
    site: str | None = None,
    layer: SupportsIndex | None = None,
    most_texts: int = 20,
    include_special: bool = False,
) -> list[JsonDict]:
    """Returns one JSON object for each feature, in the manner of Neuronpedia's export, and writes them to `path` if
    given.

    An object has modelId, source (site and layer), index, maxActApprox, frac_nonzero (over committed rows), and
    activations: the texts in which the feature is most active, each with tokens, values, maxValue, minValue and
    maxValueTokenIndex. A text is a request without its last token, which has no row; or a rejected draft after the text
    before it. Its `status` says which: committed or rolled_back. Logits and explanations are not there.
    features: numbers of the dictionary.  site, layer: by default those that the dictionary was trained on.
    most_texts: of a feature, at most.  include_special: by default, special tokens and the first position have value 0
    and do not count in frac_nonzero.
    Raises: ValueError for no feature, an unknown one, or rows without states; DictionaryError as `Trace.features`.
    """
    numbers = [whole_number("a feature", one) for one in features]
    if not numbers or not all(0 <= one < dictionary.config.d_sae for one in numbers):
        raise ValueError(f"features must be of 0 to {dictionary.config.d_sae - 1}, at least one; got {numbers!r:.60}")
    most_texts = whole_number("most_texts", most_texts, at_least=1)
    site, at, rows = place_of_features(trace, dictionary, None, site, layer, include_special=True)
    rows = rows[rows.status.isin(["committed", "rolled_back"])]
    encoded = map(dictionary.encode, states_to_encode(trace, dictionary, site, at, rows))
    values = torch.cat([part[:, numbers].float() for part in encoded])
    is_read = torch.tensor(include_special | ~trace.is_special(rows).to_numpy())
    values[~is_read] = 0
    texts = [(status, list(where)) for status, where in _texts(rows)]
    committed = torch.tensor((rows.status == "committed").tolist()) & is_read
    found = []
    for column, number in enumerate(numbers):
        own = values[:, column]
        shown = sorted(texts, key=lambda text: -float(own[text[1]].max()))[:most_texts]
        known = own[committed] if committed.any() else own
        found.append(
            {
                "modelId": trace.fingerprint["model"],
                "source": f"{at}-{site}",
                "index": str(number),
                "maxActApprox": float(known.max()),
                "frac_nonzero": float((known > 0).double().mean()),
                "activations": [_activation(rows, own, where, status) for status, where in shown],
            }
        )
    if path is not None:
        write_whole(
            folder("path", path), lambda to: to.write_text(json.dumps(found, ensure_ascii=False), encoding="utf-8")
        )
    return found


def _texts(rows: pd.DataFrame) -> Iterator[tuple[str, Sequence[int]]]:
    """Yields the texts of each request as (status, line numbers in `rows`). The first is "committed": all committed
    rows, by position. Each rejected draft gives one more, "rolled_back": the committed rows before the draft, then the
    rows of the draft."""
    place = pd.Series(range(len(rows)), rows.index)
    for _, own in rows.groupby("request_id", sort=True):
        kept = own[own.status == "committed"].sort_values("position")
        if len(kept):
            yield "committed", place[kept.index].tolist()
        for _, lost in own[own.status == "rolled_back"].groupby("step", sort=True):
            lost = lost.sort_values("position")
            before = kept[kept.position < lost.position.iloc[0]]
            yield "rolled_back", [*place[before.index].tolist(), *place[lost.index].tolist()]


def _activation(rows: pd.DataFrame, own: Tensor, where: Sequence[int], status: str) -> JsonDict:
    values = own[list(where)]
    return {
        "tokens": rows.token.iloc[list(where)].tolist(),
        "values": values.tolist(),
        "maxValue": float(values.max()),
        "minValue": float(values.min()),
        "maxValueTokenIndex": int(values.argmax()),
        "request": int(rows.request_id.iloc[where[0]]),
        "status": status,
    }
