"""Computes what a Thinking States model thinks, from a trace: the thoughts that it would write from other layers (the
thought lens), and the activations inside its thinking and compression blocks, from the states at layer l_out - 1 (H).
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

import pandas as pd
import torch
from torch import Tensor

from cacheprobe.core.values import TableLine
from cacheprobe.lenses.base import LensError
from cacheprobe.lenses.thought import ThoughtLens
from cacheprobe.models.base import CachedLM
from cacheprobe.ops.sampling import lowest_argmax
from cacheprobe.trace.recording.stored_states import require_model
from cacheprobe.trace.tables.thoughts import says_state

if TYPE_CHECKING:
    from cacheprobe.models.hf.hooked import HookPoint
    from cacheprobe.models.thinking.lm import ThinkingLM
    from cacheprobe.trace.trace import Trace

BLOCKS = ("thinking.", "compression.")
OTHER_KERNEL = "hook_pattern"
"""Attention patterns are computed only if this hook is used, by another kernel, which gives other bits."""


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


def rows_of(trace: "Trace", thought: TableLine) -> pd.DataFrame:
    """Returns a DataFrame of the rows whose states the thinking block read for a thought, one for each position of its
    chunk.

    If a position has several rows, the newest one that was computed in the thought's step or before.
    thought: a line of `trace.thoughts()`.
    """
    table = trace.row_table
    chunk_rows = table[(table.request_id == thought.request_id) & table.position.between(thought.start, thought.end)]
    return chunk_rows[chunk_rows.step <= thought.step].sort_values(["position", "step"]).groupby("position").tail(1)


def thought_activations(trace: "Trace", thought: int, model: CachedLM | None = None) -> dict[str, Tensor]:
    """Returns the activations inside the thinking block and the compression block for one thought: a dict from hook
    name to tensor.

    thought: a number from `trace.thoughts()`, including rolled-back ones. Attention patterns are left out.
    "thinking.hook_logits" is [max_thought + 1, v]: line i has the logits from which token i of the thought was chosen,
    with the pad's set to the minimum. "compression.hook_state" is the chunk state, [c, m]. In the thinking block,
    positions are the chunk's c and then the thought's, [c+r, m] or [c+r, h, d]; in the compression block, the
    thought's. Thoughts are padded to `max_thought`: at the end in the thinking block, in front in the compression
    block.
    These activations are not stored, because they depend only on the output H of layer l_out - 1 and the thought. The
    bits equal the run's if its states were stored unrounded.
    Raises: LensError if the model writes no thoughts, KeyError for an unknown thought, ValueError if S at layer l_out -
    1 was not captured, or if this model writes another thought than the trace holds.
    Source: Thinking States (arXiv 2602.08332), Eq. 4 and 5.
    Twin: tests.thinking.test_thinking_engine: the thinking block's hooks on the live model while it thinks, and the
    chunk state, ==.
    """
    lm = cast("ThinkingLM", require_model(trace, model))
    ThoughtLens().check(lm)
    table = trace.thoughts()
    if thought not in table.index:
        raise KeyError(f"no thought {thought} in this trace; it has thoughts 0 to {len(table) - 1}")
    line = table.loc[thought]
    config, token_ids = lm.config, list(line.token_ids)
    hidden = trace.vectors("S", config.l_out - 1, rows_of(trace, line)).to(lm.device, lm.dtype)
    ids = torch.tensor([[*token_ids, *[config.pad_id] * (config.max_thought - len(token_ids))]], device=lm.device)
    captured: dict[str, Tensor] = {}

    def capture(value: Tensor, hook: "HookPoint") -> None:
        """Copies an activation into `captured`, by its hook name."""
        captured[str(hook.name)] = value[0].clone()

    names = [name for name in lm.model.hook_dict if name.startswith(BLOCKS) and not name.endswith(OTHER_KERNEL)]
    with torch.inference_mode(), lm.model.hooks(fwd_hooks=[(name, capture) for name in names]):
        logits = captured["thinking.hook_logits"] = lm.model.think(hidden[None], ids)[0]
        lm.model.compress(ids)
    chosen = [lowest_argmax(logits[i].float()) for i in range(len(token_ids))]
    if chosen != token_ids:
        raise ValueError(
            f"thought {thought} of request {line.request_id} at step {line.step} is {token_ids}, and {lm.name} thinks "
            f"{chosen} there; give the model that wrote the trace, without hooks or edits that it had not"
        )
    return captured
