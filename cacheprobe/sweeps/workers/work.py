"""Runs one cell of a sweep on a loaded model, and saves its shard. The bytes of the shard depend on the cell only."""

from collections.abc import Sequence
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
from cacheprobe.sweeps.cells import Cell
from cacheprobe.sweeps.factory import NEEDS_STATES, make_changes, make_lens, parse_change
from cacheprobe.tasks import Example
from cacheprobe.trace.storage import save_trace
from cacheprobe.trace.trace import Trace


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
    settings = dict(
        window=axes["window"],
        seed=axes["seed"],
        lens=make_lens(axes["lens"], model),
        sampling=SamplingParams(
            temperature=common["temperature"], top_k=common["top_k"], top_p=common["top_p"], stop=tuple(common["stop"])
        ),
        layers="all" if common["layers"] is None else list(common["layers"]),
        **{name: common[name] for name in ("deterministic", "determinism", "max_new_tokens", "capacity", "group")},
        **{name: common[name] for name in ("prefill_chunk", "prefill_group", "pad_prefill")},
        progress=False,
    )
    drafter = make("drafters", axes["drafter"]) if axes["drafter"] else None
    changes = _changes(axes["intervention"], model, examples, settings)
    capture = CaptureConfig(common["capture"])
    return run(model, examples, drafter=drafter, capture=capture, interventions=changes, **settings)


def _changes(text: str | None, model: CachedLM, examples: Sequence[Example], settings: JsonDict) -> list[Intervention]:
    """Returns a list with the cell's Intervention for each request; [] if the cell has none."""
    if text is None:
        return []
    change, states = parse_change(text), None
    if change.name in NEEDS_STATES:
        site, layer = change.where["site"], change.where["layer"]
        of_layer: JsonDict = {**settings, "layers": [layer], "lens": None}
        unchanged = run(model, examples, capture=site, **of_layer)
        states = torch.cat([unchanged.states(site, layer, request.request_id) for request in unchanged.requests])
    return make_changes(change, range(len(examples)), states)


def _plain(value: object) -> object:
    """Returns a NumPy number as a Python number, and NaN, which JSON does not have, as None; other values unchanged."""
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and value != value else value
