"""Reads the captured states of a trace with any lens: at S, T or C, for any rows, including rolled-back ones."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, cast

import pandas as pd

from cacheprobe.core.records import DISCARDED_DRAFT
from cacheprobe.core.tokens import visible
from cacheprobe.lenses.base import Lens, LensError, require_readable
from cacheprobe.lenses.logit import LogitLens
from cacheprobe.models.base import CachedLM
from cacheprobe.trace.recording.later import read_now
from cacheprobe.trace.recording.stored_states import read_rows, require_model
from cacheprobe.trace.tables.build import hypotheses_table
from cacheprobe.trace.tables.draft_verdicts import with_verdicts

if TYPE_CHECKING:
    from cacheprobe.trace.data import TraceData
    from cacheprobe.trace.trace import Trace


def readable(trace: "Trace") -> "Trace":
    """Changes an imported trace, or a loaded run with lens="later", so that `trace.hypotheses()` reads its states with
    the logit lens; returns the same trace.

    The trace needs its model. Another trace is returned unchanged.
    """
    if trace.is_unread:
        trace.reading_later = read_now
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
    columns, errors = read_rows(trace, model, lens, site, chosen, table, targets)
    for message in errors.values():
        raise LensError(message)
    table = hypotheses_table(columns, trace.row_table, lens.name, model.token_texts, site)
    lengths = {request.request_id: request.num_prompt_tokens for request in trace.requests}
    return with_verdicts(table, trace.row_table, trace.event_table, lengths, _Texts(model))


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
