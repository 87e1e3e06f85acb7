"""Routing the slow way: hooks on the routers of an uncached Hugging Face model with its own experts, one text alone."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

_ROUTERS = (".gate", ".router")


def routing_slowly(model: PreTrainedModel, token_ids: Sequence[int]) -> dict[int, tuple[Tensor, Tensor]]:
    """(expert ids, weights) [t, k] of each layer with experts, the largest weight first."""
    model.set_experts_implementation("eager")
    seen: dict[int, tuple[Tensor, Tensor]] = {}
    handles = []
    for name, module in model.named_modules():
        if name.endswith(_ROUTERS) and hasattr(module, "top_k"):

            def note(_: Any, args: Any, output: Any, layer: int = int(name.split(".")[2])) -> None:
                weights, order = output[1].float().sort(dim=-1, descending=True, stable=True)
                seen[layer] = output[2].gather(-1, order), weights

            handles.append(module.register_forward_hook(note))
    with torch.inference_mode():
        model(torch.tensor([list(token_ids)]), use_cache=False)
    for handle in handles:
        handle.remove()
    return seen


def ablated_slowly(model: PreTrainedModel, layers: Sequence[int], experts: Sequence[int]) -> PreTrainedModel:
    """The model, whose routers at these layers have a logit of minus infinity for these experts."""
    model.set_experts_implementation("eager")
    for name, module in model.named_modules():
        if name.endswith(_ROUTERS) and hasattr(module, "top_k") and int(name.split(".")[2]) in layers:
            own = module.forward

            def forward(hidden: Tensor, own: Any = own) -> Any:
                plain = functional.linear

                def masked(*args: Any, **kwargs: Any) -> Tensor:
                    logits = plain(*args, **kwargs)
                    logits[..., list(experts)] = -torch.inf
                    return logits

                functional.linear = masked
                try:
                    return own(hidden)
                finally:
                    functional.linear = plain

            module.forward = forward
    return model
