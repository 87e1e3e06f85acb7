"""Thoughts that other layers would have written: the thought lens over a trace's chunks."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from cacheprobe.analysis.reading import require_model
from cacheprobe.lenses.base import LensError
from cacheprobe.lenses.thought import ThoughtLens
from cacheprobe.trace.tables.thoughts import says_state

if TYPE_CHECKING:
    from cacheprobe.trace.trace import Trace


def read_thoughts(trace: "Trace", layers: Iterable[int] | None = None, model: Any = None) -> pd.DataFrame:
    """By thought and layer, what T says of the chunk's S at that layer: one line each, rolled-back chunks included.

    layers: those kept, by default.
    Columns: thought, request_id, step, status, chunk, start, end and true_state as in `trace.thoughts()`; layer;
    token_ids; said (its words, "" for an empty thought); first_logprob_nats and entropy_nats of its first token's
    choice; is_thought: whether it is what the model thought; agrees: whether it says the true state, null where either
    is missing. A chunk has no line for a layer that did not run, or where one of its states was not kept.
    Raises: LensError where the model writes no thoughts or a layer does not exist, ValueError where S was not kept.
    """
    model = require_model(trace, model)
    lens = ThoughtLens()
    lens.check(model)
    thoughts = trace.thoughts()
    chosen = list(trace.store.layers if layers is None else layers)
    if unknown := [layer for layer in chosen if not 0 <= layer < model.n_layers]:
        raise LensError(f"unknown layer {unknown[0]}; {model.name} has layers 0 to {model.n_layers - 1}")
    for layer in chosen:
        trace.vectors("S", layer, [])  # says what was not kept
    read_by = [
        (thought, layer, rows.state_index.tolist())
        for thought in thoughts.itertuples()
        for rows in [rows_of(trace, thought)]
        for layer in chosen
        if len(rows) == thought.end + 1 - thought.start
        and (rows.state_index >= 0).all()
        and (rows.num_layers > layer).all()
    ]
    if not read_by:
        raise ValueError("there is no thought to read: no layer was asked for, or no chunk's states were kept")
    chunks = torch.stack([trace.store.all_of("S", layer)[index] for _, layer, index in read_by])
    read = lens.read(model, chunks.to(model.device, model.dtype))
    logprobs = read.first_logits.double().log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs.clamp(min=-1e6)).sum(-1)
    examples = {request.request_id: request.example for request in trace.requests}
    records = []
    for i, (token_ids, line) in enumerate(zip(read.token_ids.tolist(), logprobs, strict=True)):
        thought, layer, _ = read_by[i]
        kept = token_ids[: token_ids.index(model.config.eos_id) + 1] if model.config.eos_id in token_ids else token_ids
        said = model.decode([token for token in kept if token != model.config.eos_id]).strip()
        true_state = None if pd.isna(thought.true_state) else thought.true_state
        shared = ("thought", "request_id", "step", "status", "chunk", "start", "end")
        records.append(
            {
                **{name: getattr(thought, name) for name in shared},
                "true_state": true_state,
                "layer": layer,
                "token_ids": kept,
                "said": said,
                "first_logprob_nats": float(line[kept[0]]),
                "entropy_nats": float(entropy[i]),
                "is_thought": kept == list(thought.token_ids),
                "agrees": says_state(said, true_state, examples[thought.request_id]),
            }
        )
    return pd.DataFrame(records).astype({"true_state": "string", "agrees": "boolean"})


def rows_of(trace: "Trace", thought: Any) -> pd.DataFrame:
    """The rows whose states T read, in order of position: what was newest at each of the chunk's when it thought."""
    table = trace.row_table
    mine = table[(table.request_id == thought.request_id) & table.position.between(thought.start, thought.end)]
    return mine[mine.step <= thought.step].sort_values(["position", "step"]).groupby("position").tail(1)
