"""Computes again the activations inside the thinking block and the compression block of a Thinking States model.

Their input is the trace's states at layer l_out - 1 (called H) and its thoughts.
"""

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from cacheprobe.analysis.thought_readings import rows_of
from cacheprobe.capture.stored_states import require_model
from cacheprobe.lenses.thought import ThoughtLens
from cacheprobe.models.base import CachedLM
from cacheprobe.ops.sampling import lowest_argmax

if TYPE_CHECKING:
    from cacheprobe.models.hf.hooked import HookPoint
    from cacheprobe.models.thinking.lm import ThinkingLM
    from cacheprobe.trace.trace import Trace

BLOCKS = ("thinking.", "compression.")
OTHER_KERNEL = "hook_pattern"
"""Attention patterns are computed only if this hook is used, by another kernel, which gives other bits."""


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
