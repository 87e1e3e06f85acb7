"""Reads the captured states of a trace with any lens, at S, T or C, for rows of every status; computes divergences of
whole distributions, and ranks of rejected tokens."""

import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, cast

import numpy as np
import pandas as pd
import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from cacheprobe.core.records import DISCARDED_DRAFT
from cacheprobe.core.tokens import visible
from cacheprobe.lenses.base import Lens, LensError, require_readable
from cacheprobe.lenses.logit import LogitLens
from cacheprobe.models.base import CachedLM
from cacheprobe.trace.recording.stored_states import read_now, read_rows, require_model
from cacheprobe.trace.tables.build import hypotheses_table, texts_of
from cacheprobe.trace.tables.draft_verdicts import with_verdicts

if TYPE_CHECKING:
    from cacheprobe.trace.data import TraceData
    from cacheprobe.trace.trace import Trace


def readable(trace: "Trace") -> "Trace":
    """Changes a trace without lens readings, or a loaded run with lens="later", so that `trace.hypotheses()` reads its
    states with the logit lens; returns the same trace.

    The trace needs its model. A run that recorded readings is returned unchanged.
    """
    if trace.is_unread:
        trace.reading_later = read_now
    if trace.meta["kind"] == "import" or "Z" not in (trace.meta["capture"]["sites"] or ""):
        trace.reading_of_states = _by_logit_lens
    return trace


def _by_logit_lens(trace: "TraceData") -> pd.DataFrame:
    """Reads the captured states of a trace with the logit lens; returns the DataFrame of `read_states`. Warns if the
    states were stored rounded."""
    kept, dtype = trace.meta["capture"]["dtype"], trace.fingerprint["dtype"]
    if kept not in (None, dtype):
        warnings.warn(f"Z is read from states of a {dtype} model that were stored in {kept}", RuntimeWarning, 2)
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


_VECTORS_AT_ONCE = 240


def divergences(
    trace: "Trace",
    lens: Lens,
    layers: Iterable[int] | None = None,
    rows: pd.DataFrame | None = None,
    model: CachedLM | None = None,
) -> pd.DataFrame:
    """Returns a DataFrame with one line for each row and layer: how far the lens reading is from the model's output.

    Columns: row, request_id, step, phase, status, position, layer; entropy_nats of the reading; kl_output_nats:
    KL(output || reading), where output is the reading of the last layer, null if that layer was not run or not
    captured;
    js_next_nats: Jensen-Shannon divergence to the reading of layer + 1, at most ln 2, null if layer + 1 was not read.
    layers, rows: as in `analysis.reading.read_states`; give rolled-back rows by `rows`.
    Source: KL to the final layer, Belrose et al. 2023 (arXiv 2303.08112), section 3; Jensen-Shannon between layers,
    Chuang et al. 2023 (DoLa, arXiv 2309.03883), section 2.2.
    Twin: tests.twins.measures_slowly.divergences_slowly, close(1e-4): sums are taken in float32.
    """
    model = require_model(trace, model)
    chosen = sorted(trace.store.layers if layers is None else layers)
    require_readable(lens, model, "S", chosen)
    table = predicting_rows(trace) if rows is None else rows
    for layer in chosen:
        trace.state_indices("S", layer, table[table.num_layers > layer])  # raises an error that names what was not kept
    last = model.n_layers - 1
    needed = [*chosen, last] if last in trace.store.layers and last not in chosen else chosen
    parts = []
    for num_layers, group in table.groupby("num_layers"):
        ran = [layer for layer in needed if layer < num_layers]
        height = max(_VECTORS_AT_ONCE // max(len(ran), 1), 1)
        for start in range(0, len(group) if ran else 0, height):
            some = group.iloc[start : start + height]
            index = torch.tensor(some.state_index.to_numpy())
            states = torch.stack([trace.store.some_of("S", layer, index) for layer in ran]).to(
                model.device, model.dtype
            )
            parts.append(_divergences_of(model, lens, states, ran, some, last))
    if not parts:
        raise ValueError("there is nothing to read: no layer, or no row, was asked for")
    joined = pd.concat(parts, ignore_index=True)
    return joined[joined.layer.isin(chosen)].sort_values(["request_id", "step", "row", "layer"], ignore_index=True)


@torch.inference_mode()
def _divergences_of(
    model: CachedLM, lens: Lens, states: Float[Tensor, "l n m"], layers: list[int], rows: pd.DataFrame, last: int
) -> pd.DataFrame:
    """Returns the lines of `divergences` for the given layers and rows, as a DataFrame."""
    number = torch.tensor(layers, device=states.device).repeat_interleave(states.shape[1])
    logits = lens.logits(model, rearrange(states, "l n m -> (l n) m"), number)
    logprobs = rearrange(logits.float().log_softmax(-1), "(l n) v -> l n v", l=len(states))
    missing = torch.full(states.shape[1:2], torch.nan)
    output = logprobs[layers.index(last)] if last in layers else None
    columns: dict[str, list[Tensor]] = {"entropy_nats": [], "kl_output_nats": [], "js_next_nats": []}
    for i, layer in enumerate(layers):
        of_layer = logprobs[i]
        columns["entropy_nats"].append(_mean_under(of_layer, -of_layer))
        columns["kl_output_nats"].append(missing if output is None else _mean_under(output, output - of_layer))
        has_next = i + 1 < len(layers) and layers[i + 1] == layer + 1
        columns["js_next_nats"].append(_jensen_shannon(of_layer, logprobs[i + 1]) if has_next else missing)
    row_info = {key: np.tile(rows[key].to_numpy(), len(layers)) for key in _ABOUT}
    values = {name: torch.cat([part.cpu() for part in listed]).numpy() for name, listed in columns.items()}
    return pd.DataFrame({**row_info, "layer": np.repeat(layers, len(rows)), **values})


_ABOUT = ("row", "request_id", "step", "phase", "status", "position")


def _mean_under(logprobs: Tensor, values: Tensor) -> Tensor:
    """Returns the mean [n] of values [n, v] under the distribution exp(logprobs); tokens with probability 0 add 0."""
    return (logprobs.exp() * values).masked_fill(logprobs == -torch.inf, 0.0).sum(-1)


def _jensen_shannon(one: Tensor, other: Tensor) -> Tensor:
    """Returns the Jensen-Shannon divergence [n], in nats, of two distributions given as log-probabilities [n, v]."""
    middle = torch.logaddexp(one, other) - float(np.log(2))
    return (_mean_under(one, one - middle) + _mean_under(other, other - middle)) / 2


def rejected_tokens(trace: "Trace", lens: Lens, model: CachedLM | None = None) -> pd.DataFrame:
    """Returns a DataFrame with the rank and log-probability, in a lens, of each rejected draft token and of the token
    committed instead.

    One line for each layer of each verify row that predicted a rejected token: row, request_id, step, position (of the
    row; both tokens stand at position + 1), layer, rejected_token_id, rejected_token, rejected_rank,
    rejected_logprob_nats; committed_token_id, committed_token, rank, committed_logprob_nats as in `Trace.hypotheses`.
    Only first mismatches are included: later draft tokens follow text that was never committed.
    Raises: ValueError if no draft was rejected, or if the states were not captured.
    Twin: tests.twins.measures_slowly.rejected_tokens_slowly, close(1e-5).
    """
    model = require_model(trace, model)
    pairs = []
    for event in trace.event_table[trace.event_table.phase == "verify"].itertuples():
        if event.num_rolled_back:
            at = int(event.draft_start) + int(event.num_accepted) - 1
            pairs.append((event.request_id, event.step, at, event.draft_token_ids[event.num_accepted]))
    if not pairs:
        raise ValueError("no draft of this run was rejected, so there is nothing to compare")
    drafted = pd.DataFrame(pairs, columns=["request_id", "step", "position", "rejected_token_id"])
    table = trace.row_table[(trace.row_table.phase == "verify") & (trace.row_table.state_index >= 0)]
    rows = table.merge(drafted, on=["request_id", "step", "position"])
    token_of_row = dict(zip(rows.row, rows.rejected_token_id, strict=True))
    of_committed = read_states(trace, lens, rows=rows, model=model)
    of_rejected = read_states(trace, lens, rows=rows, model=model, targets=token_of_row)
    row_info = of_committed[["row", "request_id", "step", "position", "layer"]]
    return row_info.assign(
        rejected_token_id=of_rejected.committed_token_id,
        rejected_token=texts_of(of_rejected.committed_token_id.to_numpy(dtype=int), model.token_texts),
        rejected_rank=of_rejected["rank"],
        rejected_logprob_nats=of_rejected.committed_logprob_nats,
        **{name: of_committed[name] for name in ("committed_token_id", "committed_token", "rank")},
        committed_logprob_nats=of_committed.committed_logprob_nats,
    )
