"""Reads the stored states of a trace through a lens, row by row as during a run, so that the bits are those of a
reading during the run."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pandas as pd
import torch
from torch import Tensor

from cacheprobe.core.config import CaptureConfig
from cacheprobe.core.hook_names import ALL_SITES
from cacheprobe.core.live import require_usable_process
from cacheprobe.core.records import fingerprint_differences
from cacheprobe.core.values import hint
from cacheprobe.engine.sizes import require_readings_fit
from cacheprobe.lenses.base import Lens, LensError
from cacheprobe.lenses.logit import LogitLens
from cacheprobe.models.base import CachedLM
from cacheprobe.models.settings import hold_model
from cacheprobe.trace.data import TraceData
from cacheprobe.trace.recording.lens_reader import LensReader, Queued
from cacheprobe.trace.tables import build as tables

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
    """Reads stored states of the given rows through a lens. Returns (the columns of `LensReader.take`, {} without
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
    return reader.take(), reader.errors


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
            f"the trace is of weights {run_weights}, {model.name} has {model_weights}; load the run's model as it was: "
            f"cp.load_model({trace.fingerprint['model']!r}, dtype={trace.fingerprint['dtype']!r})"
        )
    return model


LOGIT, LATER = "logit", "later"
_NOT_OF_READINGS = {"path", "attention", "compatibility_mode", "products", "buffers_sha256"}
"""Fields of a model's fingerprint on which states depend, and readings of given states do not."""


def chosen_lens(lens: object, capture: CaptureConfig, model: CachedLM) -> tuple[Lens, CaptureConfig]:
    """Returns (the lens that a run's argument `lens` means, the part of `capture` that is recorded during the run).

    lens: a lens object, which the caller checks; "logit" or None for the logit lens; "later" for the logit lens after
    the run. With "later", the recorded part is `capture` without Z.
    Raises: LensError for another text; ValueError if "later" lacks Z or S in `capture`, or if S would be rounded.
    """
    if lens is None or lens == LOGIT:
        return LogitLens(), capture
    if lens != LATER:
        if isinstance(lens, str):
            raise LensError(
                f'lens={lens!r} is neither "{LOGIT}" nor "{LATER}"{hint(lens, (LOGIT, LATER))}; for another lens give '
                "an object, such as cp.lenses.TunedLens.load(dir, model)"
            )
        return lens, capture  # pyright: ignore[reportReturnType]  # checked by `require_readable`
    sites = capture.sites or ""
    if missing := [site for site in "SZ" if site not in sites]:
        wanted = "".join(site for site in ALL_SITES if site in sites + "SZ")
        raise ValueError(
            f'lens="later" reads Z from the stored S, and capture={sites or None!r} has no {" and no ".join(missing)}; '
            f"set capture={wanted!r}"
        )
    kept = getattr(torch, capture.dtype) if capture.dtype else model.dtype
    if torch.promote_types(kept, model.dtype) != kept:
        raise ValueError(
            f'lens="later" needs S unrounded: capture dtype {capture.dtype} cannot hold the states of a model in '
            f"{str(model.dtype).removeprefix('torch.')}; leave capture dtype out"
        )
    return LogitLens(), replace(capture, sites=sites.replace("Z", ""))


def read_now(trace: TraceData, model: CachedLM | None = None) -> None:
    """Reads Z of a run with lens="later" from its stored S, and adds to the trace what the run itself would have
    recorded: the readings, the texts of their tokens, and the requests on which the lens failed (a RuntimeWarning names
    them). Does nothing if Z was read before.

    model: the run's model; by default, the trace's own.
    Warns of settings, such as the number of threads, that differ from the run's: the bits may then differ, too.
    Raises: ValueError without the model, for one with other weights, and if the readings do not fit in memory.
    Twin: the readings of the same run with lens=None, bitwise.
    """
    if not trace.is_unread:
        return
    model = require_model(trace, model)
    _warn_of_other_settings(trace.fingerprint, model.fingerprint())
    capture = trace.meta["capture"]
    first = {r.request_id: 0 if capture["prompt_hypotheses"] else r.num_prompt_tokens - 1 for r in trace.requests}
    rows = trace.row_table
    rows = rows[(rows.state_index >= 0) & (rows.position >= rows.request_id.map(first))]
    require_readings_fit(len(rows), capture["layers"])
    lens = LogitLens()
    with hold_model(model):
        columns, errors = read_rows(trace, model, lens, "S", capture["layers"], rows)
    readings = tables.hypotheses_table(columns, trace.row_table, lens.name, model.token_texts) if columns else None
    trace.token_table = tables.tokens_table(
        trace.row_table, trace.tokens, trace.event_table, columns, model.token_texts
    )
    if failed := missing_readings(errors, bool(columns)):
        trace.meta["missing"] = {**trace.meta.get("missing", {}), **failed}
        for reason in dict.fromkeys(failed.values()):
            warnings.warn(reason, RuntimeWarning, stacklevel=2)
    trace.hypothesis_table = readings


def missing_readings(errors: Mapping[int, str], has_readings: bool) -> dict[str, str]:
    """Returns a dict: "Z of request N" -> why the lens failed on request N; {} if the lens never failed.

    Has the key "Z" too if the lens failed and no request of the run has readings.
    errors: from a `LensReader`.
    """
    whole = {"Z": next(iter(errors.values()))} if errors and not has_readings else {}
    return whole | {f"Z of request {request_id}": why for request_id, why in errors.items()}


def _warn_of_other_settings(run: Mapping[str, object], now: Mapping[str, object]) -> None:
    """Warns if the model, or this process, has other settings than the run had, on which the bits of readings depend.

    run: the fingerprint of the run.  now: the fingerprint of the model that reads.
    """
    fields = {*now, *(name for name in run if name.startswith("readings_"))} - _NOT_OF_READINGS
    ours, theirs = ({name: held[name] for name in fields if name in held} for held in (run, now))
    differing = [f"{name} is {b!r} and was {a!r}" for name, a, b in fingerprint_differences(ours, theirs)]
    if differing:
        warnings.warn(
            f"Z is read under other settings than the run's, so its bits may differ: {'; '.join(differing)}",
            RuntimeWarning,
            stacklevel=3,
        )
