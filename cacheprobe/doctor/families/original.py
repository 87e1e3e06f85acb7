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
    """Returns the tokens that `generate` of transformers adds greedily to a prompt, with its own cache."""
    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, use_cache=True,
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
        handles += [_on_output(model, p.path, _adding(states, ("T", layer), p.factor)) for p in (block.attended,)]
        handles += [_on_output(model, p.path, _adding(states, ("C", layer), p.factor)) for p in block.mlp]
        if not block.mlp:
            handles.append(_on_output(model, block.path, _adding(states, ("C", layer), 0.0)))
    try:
        logits_of(model, token_ids)
    finally:
        for handle in handles:
            handle.remove()
    return states


@contextmanager
def changing(model: LiveModule, block: PlainBlock, site: str, change: StateChange) -> Iterator[None]:
    """Changes site S, T or C of one block for every forward inside the `with`. A sum of several parts is not changed.

    Raises: ValueError for a C that several modules give.
    """
    parts = {"S": (AddedPart(block.path, 1.0),), "T": (block.attended,), "C": block.mlp}[site]
    if len(parts) != 1:
        raise ValueError(f"{site} is a sum of {len(parts)} modules")
    (part,) = parts

    def replace(value: Tensor) -> Tensor:
        """Returns the module's output with which the state is what `change` gives."""
        shaped = value if value.dim() == 3 else value[None]
        return (change(shaped * part.factor) / part.factor).view(value.shape)

    handle = _on_output(model, part.path, replace)
    try:
        yield
    finally:
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
