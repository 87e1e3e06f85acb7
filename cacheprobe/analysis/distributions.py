"""Computes measures that need whole distributions from captured states: divergences, and ranks of rejected tokens."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from cacheprobe.analysis.reading import predicting_rows, read_states
from cacheprobe.lenses.base import Lens, require_readable
from cacheprobe.models.base import CachedLM
from cacheprobe.trace.recording.stored_states import require_model
from cacheprobe.trace.tables.build import texts_of

if TYPE_CHECKING:
    from cacheprobe.trace.trace import Trace

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
