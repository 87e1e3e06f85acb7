"""Patching grids the slow way: for each cell one whole forward of the plain Hugging Face model, without any cache.

Shares no code with the grids: modules are named family by family, and every position of every layer is computed.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Patch = tuple[str, int, list[int], int | None, Tensor]
"""(site, layer, positions, head, [len(positions), w])"""


def module_of(model: Any, site: str, layer: int) -> tuple[nn.Module, str]:
    """Where a site is in the plain model: a module, and whether its input or output."""
    if model.config.model_type == "gpt2":
        block = model.transformer.h[layer]
        parts = dict(T=block.attn, C=block.mlp, heads=block.attn.c_proj)
    else:
        block = model.model.layers[layer]
        parts = dict(T=block.self_attn, C=block.mlp, heads=block.self_attn.o_proj)
        if model.config.model_type == "gemma2":
            parts |= dict(T=block.post_attention_layernorm, C=block.post_feedforward_layernorm)
    if site in ("pre", "S"):
        return block, "in" if site == "pre" else "out"
    return parts[site], "in" if site == "heads" else "out"


@contextmanager
def on(model: Any, site: str, layer: int, act: Any) -> Iterator[None]:
    """`act` sees the tensor of a site, and what it returns takes its place."""
    module, end = module_of(model, site, layer)

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (act(output[0]), *output[1:])
        return act(output)

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if args:
            return (act(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": act(kwargs["hidden_states"])}

    added = module.register_forward_hook(after)
    if end == "in":
        added.remove()
        added = module.register_forward_pre_hook(before, with_kwargs=True)
    try:
        yield
    finally:
        added.remove()


@torch.inference_mode()
def plain_run(model: Any, ids: list[int], sites: Iterable[str], patches: Iterable[Patch] = ()) -> Any:
    """(logits [v] of the last position in float64, {(site, layer): [n, w]}) of one uncached forward."""
    seen: dict[tuple[str, int], Tensor] = {}

    def keep(place: tuple[str, int], value: Tensor) -> Tensor:
        seen[place] = value[0].clone()
        return value

    def change(patch: Patch, value: Tensor) -> Tensor:
        _, _, positions, head, vectors = patch
        value = value.clone()
        width = vectors.shape[-1]
        columns = slice(None) if head is None else slice(head * width, (head + 1) * width)
        value[0, positions, columns] = vectors
        return value

    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(on(model, patch[0], patch[1], lambda value, patch=patch: change(patch, value)))
        for site in sites:
            for layer in range(model.config.num_hidden_layers):
                stack.enter_context(on(model, site, layer, lambda value, at=(site, layer): keep(at, value)))
        logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1].double()
    return logits, seen


def naive_grid(
    model: Any, clean: list[int], corrupt: list[int], site: str, *, heads: int | None = None, is_prefix: bool = False
) -> Mapping[tuple[int, ...], Tensor]:
    """{(layer, position) or (layer, position, head): logits [v]} of every patched run."""
    _, states = plain_run(model, clean, [site])
    out = {}
    for layer in range(model.config.num_hidden_layers):
        for position in range(len(clean)):
            where = list(range(position + 1)) if is_prefix else [position]
            for head in [None] if heads is None else range(heads):
                vectors = states[site, layer][where]
                if head is not None:
                    width = vectors.shape[1] // heads
                    vectors = vectors[:, head * width : (head + 1) * width]
                index = (layer, position) if head is None else (layer, position, head)
                out[index] = plain_run(model, corrupt, [], [(site, layer, where, head, vectors)])[0]
    return out
