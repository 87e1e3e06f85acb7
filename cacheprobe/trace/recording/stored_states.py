"""Reads the stored states of a trace through a lens, row by row as during a run, so that the bits are those of a
reading during the run."""

from collections.abc import Mapping, Sequence

import pandas as pd
import torch
from torch import Tensor

from cacheprobe.core.live import require_usable_process
from cacheprobe.lenses.base import Lens
from cacheprobe.models.base import CachedLM
from cacheprobe.trace.data import TraceData
from cacheprobe.trace.recording.lens_reader import LensReader, Queued

_POSITIONS_AT_ONCE = 64
"""Number of positions of one request whose rows are queued together: their states are copied from the trace."""


def read_rows(
    trace: TraceData,
    model: CachedLM,
    lens: Lens,
    site: str,
    layers: Sequence[int],
    rows: pd.DataFrame,
    targets: Mapping[int, int] | None = None,
) -> tuple[dict[str, Tensor], dict[int, str]]:
    """Reads stored states of the given rows through a lens. Returns (the columns of `LensReader.finish`, {} without
    readings; request id -> why the lens failed, for each request without readings).

    layers: captured layers. Layers that did not run for a row (an early exit) are left out.
    rows: lines of the rows table whose states were kept.  targets: by row number, the token to rank instead of the
    committed one.
    """
    reader = LensReader(model, lens, trace.meta["capture"]["top_k"])
    ordered = sorted(layers)  # so that the layers that ran are the first ones, for every row
    following = committed_after(trace, rows) if targets is None else targets
    for _, near in rows.groupby([rows.request_id, rows.position // _POSITIONS_AT_ONCE], sort=False):
        index = torch.tensor(near.state_index.to_numpy())
        states = torch.stack([trace.store.some_of(site, layer, index) for layer in ordered], 1)
        queued = []
        for row, own in zip(near.itertuples(), states, strict=True):
            ran = torch.tensor([layer for layer in ordered if layer < row.num_layers], dtype=torch.long)
            if len(ran):
                place = dict(request_id=row.request_id, step=row.step)
                queued.append(Queued(row.row, row.position, own[: len(ran)], ran, following[row.row], **place))
        reader.queue_together(queued)
    return reader.finish(), reader.errors


def committed_after(trace: TraceData, rows: pd.DataFrame) -> dict[int, int]:
    """Returns a dict from row number to the token id that the final text has at the row's position + 1; -1 if the text
    ends before."""
    texts = {r.request_id: [*(r.prompt_token_ids or ()), *trace.tokens[r.request_id], -1] for r in trace.requests}
    positions = zip(rows.row, rows.request_id, rows.position + 1, strict=True)
    return {row: texts[request][min(position, len(texts[request]) - 1)] for row, request, position in positions}


def require_model(trace: TraceData, model: CachedLM | None) -> CachedLM:
    """Returns the given model, or the trace's own model if `model` is None, after checking that its weights are those
    of the run.

    Raises: ValueError if there is no model, if its weights differ, or if the trace was imported without a model.
    """
    require_usable_process()
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
