"""Runs one cell on a loaded model, and saves its shard, whose bytes depend on the cell only."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from cacheprobe.analysis.measures import by_layer
from cacheprobe.analysis.of_trace import lens_readings
from cacheprobe.api import run
from cacheprobe.core.config import CaptureConfig
from cacheprobe.core.records import SamplingParams
from cacheprobe.core.registry import make
from cacheprobe.core.values import JsonDict
from cacheprobe.interventions.base import Intervention
from cacheprobe.models.base import CachedLM
from cacheprobe.sweeps.cells import Cell
from cacheprobe.sweeps.factory import NEEDS_STATES, make_changes, make_lens, parse_change
from cacheprobe.tasks import Example
from cacheprobe.trace.storage import save_trace
from cacheprobe.trace.trace import Trace


def run_cell(cell: Cell, model: CachedLM) -> Trace:
    """Returns the cell's trace, computed with the cell's number of threads.

    Examples and noise are drawn from the cell's seed, so cells of one seed have the same prompts. torch's global
    generator, which cacheprobe does not use, is seeded from the cell's digest.
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
    """Writes the shard: a saved run for `load_trace`, with file names from the digest, and without times."""
    trace.event_table = trace.event_table.assign(seconds=float("nan"))
    trace.meta["sweep"] = {
        "digest": cell.digest,
        "cell": cell.to_json(),
        "facts": facts(trace),
        "layers": layers(trace),
    }
    return save_trace(trace, directory, run_id=cell.digest[:8])


def facts(trace: Trace) -> dict[str, int | float | None]:
    """Returns a cell's numbers for the table of cells: requests, tokens, steps, drafts, and accuracy on the task."""
    drafted, behaviour = trace.num_drafted, trace.meta["behaviour"] or {}
    nats = [one for request in trace.requests for one in trace.logprobs(request.request_id)]
    return {
        "requests": len(trace.requests),
        "tokens": sum(len(ids) for ids in trace.tokens.values()),
        "steps": int(trace.event_table.step.nunique()),
        "drafted": drafted,
        "rolled_back": trace.num_rolled_back,
        "acceptance": 1 - trace.num_rolled_back / drafted if drafted else None,
        "logprob_nats": sum(nats) / len(nats) if nats else None,
        **{name: behaviour.get(name) for name in ("accuracy", "chance", "answer_mass", "forced_accuracy")},
    }


def layers(trace: Trace) -> list[dict[str, object]]:
    """Returns `measures.by_layer` of the readings as records; [] if Z was not kept."""
    if trace.hypothesis_table is None or trace.hypothesis_table.empty:
        return []
    table = by_layer(lens_readings(trace))
    return [{k: _plain(v) for k, v in row.items()} for row in table.to_dict("records")]


def _run(cell: Cell, model: CachedLM) -> Trace:
    axes, asked = cell.axes, cell.run
    examples = make("tasks", axes["task"]).examples(asked["n"], axes["seed"])
    settings = dict(
        window=axes["window"],
        seed=axes["seed"],
        lens=make_lens(axes["lens"], model),
        sampling=SamplingParams(
            temperature=asked["temperature"], top_k=asked["top_k"], top_p=asked["top_p"], stop=tuple(asked["stop"])
        ),
        layers="all" if asked["layers"] is None else list(asked["layers"]),
        **{name: asked[name] for name in ("deterministic", "max_new_tokens", "capacity", "group")},
        **{name: asked[name] for name in ("prefill_chunk", "prefill_group", "pad_prefill")},
        progress=False,
    )
    drafter = make("drafters", axes["drafter"]) if axes["drafter"] else None
    changes = _changes(axes["intervention"], model, examples, settings)
    capture = CaptureConfig(asked["capture"])
    return run(model, examples, drafter=drafter, capture=capture, interventions=changes, **settings)


def _changes(text: str | None, model: CachedLM, examples: Sequence[Example], settings: JsonDict) -> list[Intervention]:
    """Returns the cell's intervention for every request; mean and resample use states of a plain run of the prompts."""
    if text is None:
        return []
    change, states = parse_change(text), None
    if change.name in NEEDS_STATES:
        site, layer = change.where["site"], change.where["layer"]
        of_site: JsonDict = {**settings, "layers": [layer], "lens": None}
        plain = run(model, examples, capture=site, **of_site)
        states = torch.cat([plain.states(site, layer, request.request_id) for request in plain.requests])
    return make_changes(change, range(len(examples)), states)


def _plain(value: object) -> object:
    """Returns numpy's number as Python's; NaN, which JSON does not have, becomes None."""
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and value != value else value
