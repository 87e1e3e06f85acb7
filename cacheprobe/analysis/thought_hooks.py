"""What happened inside T and C when a thought was written: computed again from the trace's H and Z."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cacheprobe.analysis.reading import require_model
from cacheprobe.analysis.thought_readings import rows_of
from cacheprobe.lenses.thought import ThoughtLens
from cacheprobe.ops.sampling import lowest_argmax

if TYPE_CHECKING:
    from cacheprobe.trace.trace import Trace

BLOCKS = ("thinking.", "compression.")
OTHER_KERNEL = "hook_pattern"
"""Attention weights are made where somebody listens alone, by another kernel, whose bits are others."""


def thought_activations(trace: "Trace", thought: int, model: Any = None) -> dict[str, Tensor]:
    """Every activation of T and C at one thought, by the name of its hook point, patterns apart.

    thought: a number of `trace.thoughts()`, rolled-back ones included.
    "thinking.hook_logits" is [r1, v], all logits of Z, the pad's set to the lowest: line i chose token i.
    "compression.hook_state" is S, [c, m]. Elsewhere in T rows are the chunk's c and then the thought's, [c+r, m] or
    [c+r, h, d]; in C the thought's. Thoughts are padded to `max_thought`: behind in T, in front in C.
    They are not kept: they depend on H and Z alone, which are. The bits are those of the run where its states were
    kept unrounded.
    Raises: LensError where the model writes no thoughts, KeyError for a thought that is not there, ValueError where S
    below L_out was not kept, or this model does not think what the trace holds.
    Source: Thinking States (arXiv 2602.08332), Eq. 4 and 5.
    Twin: tests.test_thinking_engine, T's hooks on the live model while it thinks, and S: ==.
    """
    model = require_model(trace, model)
    ThoughtLens().check(model)
    table = trace.thoughts()
    if thought not in table.index:
        raise KeyError(f"no thought {thought} in this trace; it has thoughts 0 to {len(table) - 1}")
    line: Any = table.loc[thought]
    config, said = model.config, list(line.token_ids)
    hidden = trace.vectors("S", config.l_out - 1, rows_of(trace, line)).to(model.device, model.dtype)
    ids = torch.tensor([[*said, *[config.pad_id] * (config.max_thought - len(said))]], device=model.device)
    heard: dict[str, Tensor] = {}

    def hear(value: Tensor, hook: Any) -> None:
        heard[hook.name] = value[0].clone()

    names = [name for name in model.model.hook_dict if name.startswith(BLOCKS) and not name.endswith(OTHER_KERNEL)]
    with torch.inference_mode(), model.model.hooks(fwd_hooks=[(name, hear) for name in names]):
        logits = heard["thinking.hook_logits"] = model.model.think(hidden[None], ids)[0]
        model.model.compress(ids)
    again = [lowest_argmax(logits[i].float()) for i in range(len(said))]
    if again != said:
        raise ValueError(
            f"thought {thought} of request {line.request_id} at step {line.step} is {said}, and {model.name} thinks "
            f"{again} there; give the model that wrote the trace, without hooks or edits that it had not"
        )
    return heard
