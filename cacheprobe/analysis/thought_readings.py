"""Computes the thoughts that a Thinking States model would write from other layers: the thought lens on a trace's
chunks.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import pandas as pd
import torch

from cacheprobe.capture.stored_states import require_model
from cacheprobe.lenses.base import LensError
from cacheprobe.lenses.thought import ThoughtLens
from cacheprobe.models.base import CachedLM
from cacheprobe.trace.tables.thoughts import says_state

if TYPE_CHECKING:
    from cacheprobe.models.thinking.lm import ThinkingLM
    from cacheprobe.trace.trace import Trace

Chunk: TypeAlias = Any
"""A line of `trace.thoughts()`, as a named tuple or a Series."""


def read_thoughts(trace: "Trace", layers: Iterable[int] | None = None, model: CachedLM | None = None) -> pd.DataFrame:
    """Returns a DataFrame with one line for each thought and layer: what the model would write from that layer's
    states.

    The thinking block reads S of the chunk at each layer, instead of S at layer l_out - 1. Rolled-back chunks are
    included.
    layers: by default, the captured ones.
    Columns: thought, request_id, step, status, chunk, start, end and true_state as in `trace.thoughts()`; layer;
    token_ids; said (its words, "" for an empty thought); first_logprob_nats and entropy_nats of its first token's
    choice; is_thought: whether it equals the model's own thought; agrees: whether it states the true state, null if
    either is missing. A chunk has no line for a layer that did not run, or if one of its states was not captured.
    Raises: LensError if the model writes no thoughts or a layer does not exist, ValueError if S was not captured.
    """
    lm = cast("ThinkingLM", require_model(trace, model))
    lens = ThoughtLens()
    lens.check(lm)
    thoughts = trace.thoughts()
    chosen = list(trace.store.layers if layers is None else layers)
    if unknown := [layer for layer in chosen if not 0 <= layer < lm.n_layers]:
        raise LensError(f"unknown layer {unknown[0]}; {lm.name} has layers 0 to {lm.n_layers - 1}")
    for layer in chosen:
        trace.state_indices("S", layer, [])  # raises an error that names what was not kept
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
    chunks = torch.stack([trace.store.some_of("S", layer, torch.tensor(index)) for _, layer, index in read_by])
    read = lens.read(lm, chunks.to(lm.device, lm.dtype))
    logprobs = read.first_logits.double().log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs.clamp(min=-1e6)).sum(-1)
    examples = {request.request_id: request.example for request in trace.requests}
    records = []
    for i, (token_ids, line) in enumerate(zip(read.token_ids.tolist(), logprobs, strict=True)):
        thought, layer, _ = read_by[i]
        kept = token_ids[: token_ids.index(lm.config.eos_id) + 1] if lm.config.eos_id in token_ids else token_ids
        said = lm.decode([token for token in kept if token != lm.config.eos_id]).strip()
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


def rows_of(trace: "Trace", thought: Chunk) -> pd.DataFrame:
    """Returns a DataFrame of the rows whose states the thinking block read for a thought, one for each position of its
    chunk.

    If a position has several rows, the newest one that was computed in the thought's step or before.
    """
    table = trace.row_table
    chunk_rows = table[(table.request_id == thought.request_id) & table.position.between(thought.start, thought.end)]
    return chunk_rows[chunk_rows.step <= thought.step].sort_values(["position", "step"]).groupby("position").tail(1)
