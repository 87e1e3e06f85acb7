"""Implements lens="later": a run records S, and the logit lens reads Z from it when a table or view first needs it."""

import warnings
from collections.abc import Mapping
from dataclasses import replace

import torch

from cacheprobe.core.config import CaptureConfig
from cacheprobe.core.records import fingerprint_differences
from cacheprobe.core.values import hint
from cacheprobe.engine.sizes import require_readings_fit
from cacheprobe.lenses.base import Lens, LensError
from cacheprobe.lenses.logit import LogitLens
from cacheprobe.models.base import CachedLM
from cacheprobe.models.settings import hold_model
from cacheprobe.trace.data import TraceData
from cacheprobe.trace.recording.stored_states import read_rows, require_model
from cacheprobe.trace.tables import build as tables

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
        wanted = "".join(site for site in "STCZ" if site in sites + "SZ")
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
