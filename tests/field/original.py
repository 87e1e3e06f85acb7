"""Computes with PyTorch hooks on an untouched transformers model what the columns of the table compare with.

Shares no code with the capture and the edits of `models/plain`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from cacheprobe.core.live import LiveModule, ModuleValue
from cacheprobe.models.plain.structure import AddedPart, PlainBlock

StateChange = Callable[[Tensor], Tensor]
"""Function from a state [b, t, m] to the state that replaces it."""


def logits_of(model: LiveModule, token_ids: Sequence[int]) -> Tensor:
    """Returns logits [t, v] of one forward without a cache."""
    with torch.inference_mode():
        return model(torch.tensor([list(token_ids)]), use_cache=False).logits[0]


def generated(model: LiveModule, prompt: Sequence[int], count: int, stops: Sequence[int]) -> list[int]:
    """Returns the tokens that `generate` of transformers adds greedily to a prompt, with its own cache; without it if
    the model has a least time step, which transformers applies to several tokens and not to one."""
    ids = torch.tensor([list(prompt)])
    is_limited = any((getattr(module, "time_step_limit", None) or (0.0,))[0] > 0 for module in model.modules())
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, use_cache=not is_limited,
            eos_token_id=list(stops) or None, pad_token_id=0,
        )  # fmt: skip
    return out[0, len(prompt) :].tolist()


def states_of(
    model: LiveModule, blocks: Sequence[PlainBlock], token_ids: Sequence[int]
) -> dict[tuple[str, int], Tensor]:
    """Returns {(site, layer): [t, m]} of sites S, T and C from one forward without a cache."""
    states: dict[tuple[str, int], Tensor] = {}
    handles = []
    for layer, block in enumerate(blocks):
        handles.append(_on_output(model, block.path, _adding(states, ("S", layer), 1.0)))
        for site, parts in (("T", block.attended), ("C", block.mlp)):
            added = [(part.path, part.factor) for part in parts] or [(block.path, 0.0)]
            handles += [_on_output(model, path, _adding(states, (site, layer), factor)) for path, factor in added]
    try:
        logits_of(model, token_ids)
    finally:
        for handle in handles:
            handle.remove()
    return states


@contextmanager
def changing(model: LiveModule, block: PlainBlock, site: str, change: StateChange) -> Iterator[None]:
    """Changes site S, T or C of one block for every forward inside the `with`. Of several parts that are added, the
    last one is changed so that the sum is. Raises: ValueError for a site to which the block adds nothing."""
    parts = {"S": (AddedPart(block.path, 1.0),), "T": block.attended, "C": block.mlp}[site]
    if not parts:
        raise ValueError(f"{block.path} adds nothing at {site}")
    earlier: dict[tuple[str, int], Tensor] = {}

    def replace(value: Tensor) -> Tensor:
        """Returns the module's output with which the state is what `change` gives."""
        others = earlier.pop((site, 0), torch.zeros(1))
        total = value.reshape(others.shape if others.dim() > 1 else value.shape) * parts[-1].factor + others
        shaped = total if total.dim() == 3 else total[None]
        return ((change(shaped).view(total.shape) - others) / parts[-1].factor).view(value.shape)

    handles = [_on_output(model, p.path, _adding(earlier, (site, 0), p.factor)) for p in parts[:-1]]
    handles.append(_on_output(model, parts[-1].path, replace))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _adding(states: dict[tuple[str, int], Tensor], key: tuple[str, int], factor: float) -> Callable[[Tensor], None]:
    def add(value: Tensor) -> None:
        """Adds a copy of a module's output, times its factor, to the state."""
        scaled = value.detach().clone().reshape(-1, value.shape[-1]) * factor
        states[key] = states[key] + scaled if key in states else scaled

    return add


def _on_output(
    model: LiveModule, path: str, function: Callable[[Tensor], Tensor | None]
) -> torch.utils.hooks.RemovableHandle:
    def hook(module: LiveModule, args: ModuleValue, output: ModuleValue) -> ModuleValue:
        """Passes the first output tensor to the function; returns the output with the tensor replaced, if it is."""
        first = output[0] if isinstance(output, tuple) else output
        changed = function(first)
        if changed is None:
            return None
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    return model.get_submodule(path).register_forward_hook(hook)
