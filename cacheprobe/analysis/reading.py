"""Reads the captured states of a trace with any lens: at S, T or C, for any rows, including rolled-back ones."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, cast

import pandas as pd
import torch

from cacheprobe.capture.lens_reader import LensReader, Queued
from cacheprobe.core.records import DISCARDED_DRAFT
from cacheprobe.core.token_text import visible
from cacheprobe.lenses.base import Lens, LensError, require_readable
from cacheprobe.lenses.logit import LogitLens
from cacheprobe.models.base import CachedLM
from cacheprobe.trace.tables.build import hypotheses_table
from cacheprobe.trace.tables.draft_verdicts import with_read_tokens, with_verdicts

if TYPE_CHECKING:
    from cacheprobe.trace.data import TraceData
    from cacheprobe.trace.trace import Trace


def readable(trace: "Trace") -> "Trace":
    """Changes an imported trace so that `trace.hypotheses()` reads its states with the logit lens; returns the same
    trace.

    The trace needs its model. Another trace than an import is returned unchanged.
    """
    if trace.meta["kind"] == "import":
        trace.reading_of_import = _by_logit_lens
    return trace


def _by_logit_lens(trace: "TraceData") -> pd.DataFrame:
    """Reads the captured states of a trace with the logit lens; returns the DataFrame of `read_states`."""
    return read_states(cast("Trace", trace), LogitLens())


def read_states(
    trace: "Trace",
    lens: Lens,
    site: str = "S",
    layers: Iterable[int] | None = None,
    rows: pd.DataFrame | None = None,
    model: CachedLM | None = None,
    targets: Mapping[int, int] | None = None,
) -> pd.DataFrame:
    """Reads captured states with a lens; returns a DataFrame with one line for each row and layer.

    Columns: as in `Trace.hypotheses`.
    site: S, T or C.  layers: by default, the captured ones.  rows: from `trace.rows(...)`; by default every row that
    predicts a generated token and was not fed a draft token that was never committed.
    targets: by row number, the token to rank instead of the committed one.
    Layers that did not run for a row (an early exit) have no line. All layers of a row are read in one product.
    Raises: LensError for a lens that cannot read these states, ValueError if the states or the model are missing.
    Twin: `trace.hypotheses()` of the same run for the same lens at S, bitwise, if states were stored unrounded.
    """
    model = require_model(trace, model)
    chosen = tuple(trace.store.layers if layers is None else layers)
    require_readable(lens, model, site, chosen)
    table = predicting_rows(trace) if rows is None else rows
    for layer in chosen or (0,):
        trace.vectors(site, layer, table[table.num_layers > layer])  # raises an error that names what was not kept
    if not chosen or table.empty:
        raise ValueError("there is nothing to read: no layer, or no row, was asked for")
    reader = LensReader(model, lens, trace.meta["capture"]["top_k"])
    kept = {layer: trace.store.all_of(site, layer) for layer in chosen}
    following = committed_after(trace, table)
    for row in table.itertuples():
        ran = [layer for layer in chosen if layer < row.num_layers]
        if ran:
            states = torch.stack([kept[layer][row.state_index] for layer in ran])
            target = following[row.row] if targets is None else targets[row.row]
            request_and_step = (row.request_id, row.step)
            reader.queue_resolved(Queued(row.row, row.position, states, torch.tensor(ran), target, *request_and_step))
    columns = reader.finish()
    for message in reader.errors.values():
        raise LensError(message)
    table = hypotheses_table(columns, trace.row_table, lens.name, model.token_texts, site)
    lengths = {request.request_id: request.num_prompt_tokens for request in trace.requests}
    table = with_verdicts(table, trace.event_table, lengths, _Texts(model))
    return with_read_tokens(table, trace.row_table)


class _Texts(dict[int, str]):
    """Maps a token id to its text, with signs such as ␣ for white space; decodes each id once."""

    def __init__(self, model: CachedLM) -> None:
        self._model = model

    def __missing__(self, token_id: int) -> str:
        self[token_id] = visible(self._model.token_texts([token_id])[0])
        return self[token_id]


def predicting_rows(trace: "Trace") -> pd.DataFrame:
    """Returns the captured rows that predict a generated token, as a DataFrame.

    Rows fed a draft token that was not committed are left out.
    """
    first = {request.request_id: request.num_prompt_tokens - 1 for request in trace.requests}
    table = trace.row_table[~trace.row_table.status.isin(DISCARDED_DRAFT)]
    return table[(table.position >= table.request_id.map(first)) & (table.state_index >= 0)]


def committed_after(trace: "Trace", rows: pd.DataFrame) -> dict[int, int]:
    """Returns a dict from row number to the token id that the final text has at the row's position + 1; -1 if the text
    ends before."""
    texts = {r.request_id: [*(r.prompt_token_ids or ()), *trace.tokens[r.request_id], -1] for r in trace.requests}
    positions = zip(rows.row, rows.request_id, rows.position + 1, strict=True)
    return {row: texts[request][min(position, len(texts[request]) - 1)] for row, request, position in positions}


def require_model(trace: "Trace", model: CachedLM | None) -> CachedLM:
    """Returns the given model, or the trace's own model if `model` is None, after checking that its weights are those
    of the run.

    Raises: ValueError if there is no model, if its weights differ, or if the trace was imported without a model.
    """
    model = model or trace.model
    if model is None:
        raise ValueError("this trace was loaded without its model; use cp.load_trace(dir, model=...)")
    model_weights, run_weights = model.fingerprint()["weights_sha256"], trace.fingerprint["weights_sha256"]
    if not run_weights:
        raise ValueError(
            "this trace was imported without a model, so nothing says whose states it holds; import it again with "
            "model=, which compares them"
        )
    if model_weights != run_weights:
        raise ValueError(
            f"the trace is of weights {run_weights}, {model.name} has {model_weights}; load "
            f"{trace.fingerprint['model']} as it was run"
        )
    return model
