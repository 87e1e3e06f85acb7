"""Right values by plain models of transformers: whole forwards without a cache, with hooks where states are changed."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def first_of(output: Any) -> Tensor:
    """The states among what a module returned."""
    return output[0] if isinstance(output, tuple) else output


@contextmanager
def changed(module: Any, change: Callable[[Tensor], object]) -> Iterator[None]:
    """`change` writes into a copy of what the module returns, [b, t, m], with which every forward inside goes on."""

    def hook(module: object, args: object, output: Any) -> Any:
        states = first_of(output).clone()
        change(states)
        return (states, *output[1:]) if isinstance(output, tuple) else states

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@torch.inference_mode()
def forward(model: Any, text: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
    """Logits [t, v], and what leaves each block, [t, m]; behind the last block, what the final norm makes of it."""
    out = model(torch.tensor([list(text)]), use_cache=False, output_hidden_states=True)
    return out.logits[0], [states[0] for states in out.hidden_states[1:]]


def generated(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy tokens, each by a whole forward."""
    text = list(prompt)
    for _ in range(count):
        text.append(int(forward(model, text)[0][-1].argmax()))
    return text[len(prompt) :]
