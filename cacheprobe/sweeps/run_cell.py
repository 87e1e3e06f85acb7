"""Runs a cell of a sweep, and commits its shard. The bytes of the shard depend on the cell only."""

import errno
import os
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from cacheprobe.analysis.measures import by_layer, lens_readings
from cacheprobe.api import run
from cacheprobe.core.config import CaptureConfig
from cacheprobe.core.records import SamplingParams
from cacheprobe.core.registry import make
from cacheprobe.core.values import JsonDict
from cacheprobe.edits.interventions.base import Intervention
from cacheprobe.models.base import CachedLM
from cacheprobe.models.loaders import load_model
from cacheprobe.sweeps.cells import Cell, ModelKey, code_version, libraries
from cacheprobe.sweeps.factory import NEEDS_STATES, make_change, make_lens
from cacheprobe.sweeps.store import SweepStore
from cacheprobe.tasks import Example
from cacheprobe.trace.storage import save_trace
from cacheprobe.trace.trace import Trace

FULL = "no space left"
"""Cause of a failure on a full disk, after which a sweep starts no more cells."""


@dataclass(frozen=True)
class Outcome:
    """Holds the result of one cell (run) of a sweep: committed, or the cause of the failure."""

    digest: str
    cause: str = ""
    """'' if the cell was committed; otherwise the cause of the failure in a few words, for counting."""
    message: str = ""
    trace: str = ""
    """Traceback of the exception."""
    seconds: float = 0.0
    """Seconds of the run and the commit, without loading the model."""
    load_seconds: float = 0.0
    """Seconds of loading the model; about 0 if the model was loaded already."""
    size: int = 0
    """Size of the shard in bytes."""


def run_and_commit(url: str, stored: JsonDict) -> Outcome:
    """Runs a cell, given as `Cell.to_json`, and commits its shard (saved run) to the sweep at `url`; returns the
    Outcome. A process keeps the model of its last cell loaded.

    An Exception is reported in the Outcome, not raised. A cell planned with other versions of code or libraries is not
    run.
    """
    cell = Cell.from_json(stored)
    began = time.perf_counter()
    loaded_at = began
    if why := _version_difference(cell):  # on another node, or since the sweep began
        return Outcome(cell.digest, "another version", why)
    try:
        model = _loaded(cell.model_key)
        loaded_at = time.perf_counter()
        trace = run_cell(cell, model)
        size = SweepStore(url).commit(cell.digest, lambda directory: save_cell(cell, trace, directory))
    except Exception as error:  # a cell's failure is a result: the others go on
        line = (str(error).strip() or type(error).__name__).splitlines()[0][:500]
        return Outcome(cell.digest, cause_of(error), line, traceback.format_exc(limit=-8))
    return Outcome(cell.digest, seconds=time.perf_counter() - loaded_at, load_seconds=loaded_at - began, size=size)


_MODEL: dict[ModelKey, CachedLM] = {}
"""The model of this process's last cell, by its key."""


def _loaded(key: ModelKey) -> CachedLM:
    if key not in _MODEL:
        release_model()  # before the next one is loaded
        name, dtype, adapter, products, device = key
        _MODEL[key] = load_model(name, dtype=dtype, device=device, adapter=adapter, products=products, progress=False)
    return _MODEL[key]


def release_model() -> None:
    """Frees the model that this process keeps loaded for its next cell."""
    _MODEL.clear()


def _version_difference(cell: Cell) -> str:
    """Returns text: how code or libraries differ from those with which the cell was planned; '' if all are equal."""
    installed = {"code": code_version(), **dict(libraries())}
    planned: dict[str, str] = {"code": cell.origin["code"], **cell.origin["libraries"]}
    differ = [name for name in installed if planned.get(name) != installed[name]]
    listed = "; ".join(f"{name} {planned.get(name)} is asked for and {installed[name]} is here" for name in differ)
    return listed and f"{listed}: install what the sweep was begun with, or begin it again"


def cause_of(error: BaseException) -> str:
    """Returns the cause of a failure as a short text, for counting: FULL for a full disk, else the class name."""
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if is_full or os.strerror(errno.ENOSPC) in str(error):  # safetensors reports a full disk only in the message
        return FULL
    return type(error).__name__


def run_cell(cell: Cell, model: CachedLM) -> Trace:
    """Runs a cell on a loaded model, with the cell's number of threads; returns the Trace.

    Examples and noise are drawn from the cell's seed, so cells of one task and seed have the same examples. torch's
    global generator, which cacheprobe does not use, is seeded from the cell's digest.
    Raises: any error of `cacheprobe.run`, and RuntimeError if a request ended with an error.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(cell.origin["threads"])
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(cell.digest[:15], 16))
            trace = _run(cell, model)
    finally:
        torch.set_num_threads(threads)
    if errors := trace.meta["errors"]:
        request_id, error = next(iter(errors.items()))
        raise RuntimeError(f"{len(errors)} of {len(trace.requests)} requests failed; request {request_id}: {error}")
    return trace


def save_cell(cell: Cell, trace: Trace, directory: Path) -> Path:
    """Writes the Trace of a cell to `directory` as a shard, which `load_trace` reads; returns the directory.

    Changes `trace`: sets its times to NaN and adds meta["sweep"], so that the bytes depend on the cell only.
    """
    trace.event_table = trace.event_table.assign(seconds=float("nan"))
    trace.meta["sweep"] = {
        "digest": cell.digest,
        "cell": cell.to_json(),
        "facts": facts(trace),
        "layers": layers(trace),
    }
    return save_trace(trace, directory, run_id=cell.digest[:8])


def facts(trace: Trace) -> dict[str, int | float | None]:
    """Returns a dictionary column of the table of cells -> number (or None) measured in a cell's Trace: tokens, steps,
    accuracy, ..."""
    drafted, behaviour = trace.num_drafted, trace.meta["behaviour"] or {}
    nats = [nat for request in trace.requests for nat in trace.logprobs(request.request_id)]
    return {
        "requests": len(trace.requests),
        "tokens": sum(len(ids) for ids in trace.tokens.values()),
        "steps": int(trace.event_table.step.nunique()),
        "drafted": drafted,
        "rolled_back": trace.num_rolled_back,
        "acceptance": 1 - trace.num_rolled_back / drafted if drafted else None,
        "logprob_nats": sum(nats) / len(nats) if nats else None,
        **{name: behaviour.get(name) for name in ("accuracy", "chance", "answer_mass", "forced_accuracy")},
        "changed_rows": int(trace.edits().committed.sum()) if trace.interventions else None,
    }


def layers(trace: Trace) -> list[dict[str, object]]:
    """Returns the table `measures.by_layer` of a Trace's readings as a list of dictionaries; [] without readings."""
    if trace.hypothesis_table is None or trace.hypothesis_table.empty:
        return []
    table = by_layer(lens_readings(trace))
    return [{k: _plain(v) for k, v in row.items()} for row in table.to_dict("records")]


def _run(cell: Cell, model: CachedLM) -> Trace:
    """Makes the examples, lens, drafter and interventions of a cell, runs the examples, and returns the Trace."""
    axes, common = cell.axes, cell.run
    examples = make("tasks", axes["task"]).examples(common["n"], axes["seed"])
    names = ("deterministic", "determinism", "max_new_tokens", "capacity", "group", "layers", "draft_length")
    settings: JsonDict = dict(
        window=axes["window"],
        seed=axes["seed"],
        lens=make_lens(axes["lens"], model),
        sampling=SamplingParams(**{name: common[name] for name in ("temperature", "top_k", "top_p", "stop")}),
        **{name: common[name] for name in (*names, "prefill_chunk", "prefill_group", "pad_prefill")},
        progress=False,
    )
    drafter = make("drafters", axes["drafter"]) if axes["drafter"] else None
    changes = _changes(axes["intervention"], model, examples, settings)
    trace = run(
        model, examples, drafter=drafter, capture=CaptureConfig(common["capture"]), interventions=changes, **settings
    )
    trace.meta.pop("draft_costs", None)  # a measurement: equal cells have equal bytes on every machine
    return trace


def _changes(text: str | None, model: CachedLM, examples: Sequence[Example], settings: JsonDict) -> list[Intervention]:
    """Returns a list with the cell's Intervention on all requests; [] if the cell has none."""
    if text is None:
        return []
    states = None
    if text.startswith(NEEDS_STATES):
        one = make_change(text)
        plain: JsonDict = {**settings, "layers": [one.layer], "lens": None}
        unchanged = run(model, examples, capture=one.site, **plain)
        states = torch.cat([unchanged.states(one.site, one.layer, r.request_id) for r in unchanged.requests])
    return [make_change(text, states)]


def _plain(value: object) -> object:
    """Returns a NumPy number as a Python number, and NaN, which JSON does not have, as None; other values unchanged."""
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and value != value else value
