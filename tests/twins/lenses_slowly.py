"""Slow twins of the lenses, of their training and of patchscopes: one row, one layer and one token at a time."""

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cacheprobe.lenses.tuned import TunedLens
from cacheprobe.models.base import CachedLM
from cacheprobe.models.thinking.lm import ThinkingLM


def product_by_layer_slowly(states: Tensor, layers: Tensor, weights: Tensor, biases: Tensor) -> Tensor:
    """A row after another, in float64."""
    rows = [
        state.double() @ weights[layer].double() + biases[layer].double()
        for state, layer in zip(states, layers.tolist(), strict=True)
    ]
    return torch.stack(rows).to(states.dtype)


def tuned_logits_slowly(model: CachedLM, lens: TunedLens, states: Tensor, layers: Tensor) -> Tensor:
    """h + W'h + b for a row of every layer but the last, and then the row alone through the model's readout."""
    out = []
    for state, layer in zip(states, layers.tolist(), strict=True):
        if layer < model.n_layers - 1:
            state = state + lens.weights[layer].T @ state + lens.biases[layer]
        out.append(model.read_out(state[None])[0])
    return torch.stack(out)


def tuned_lens_gradients_slowly(
    model: CachedLM, weights: Tensor, biases: Tensor, states: Tensor, output: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the summed layers' mean KL by weights and biases, and that KL [l]: a token after another.

    states: [l, n, m].  output: [n, v], the model's log-probabilities.
    """
    weights, biases = weights.clone().requires_grad_(), biases.clone().requires_grad_()
    kl = []
    for layer in range(len(states)):
        of_layer = torch.zeros(())
        for state, wanted in zip(states[layer], output, strict=True):
            said = model.read_out_with_gradients((state + weights[layer].T @ state + biases[layer])[None])[0]
            said = said - said.exp().sum().log()
            of_layer = of_layer + sum(wanted[i].exp() * (wanted[i] - said[i]) for i in range(len(wanted)))
        kl.append(of_layer / states.shape[1])
    torch.stack(kl).sum().backward()
    assert weights.grad is not None and biases.grad is not None
    return weights.grad, biases.grad, torch.stack(kl).detach()


def package_hash(weight: Tensor) -> str:
    """As the tuned-lens package takes it."""
    return hashlib.sha256(str.encode(np.array_str(weight.float().numpy(), precision=1))).hexdigest()


def thought_slowly(model: ThinkingLM, chunk: Tensor) -> tuple[list[int], Tensor]:
    """One chunk [c, m] alone: T is asked for a token, is given it, and is asked for the next. No pads."""
    said: list[int] = []
    first = torch.empty(0)
    while len(said) < model.config.max_thought and model.config.eos_id not in said:
        logits = model.model.think(chunk[None], torch.tensor([said], dtype=torch.long))[0, -1].float().detach()
        first = first if said else logits
        said.append(max(range(len(logits)), key=lambda i, logits=logits: (float(logits[i]), -i)))
    return said, first


@torch.inference_mode()
def inserted_slowly(model: Any, ids: list[int], position: int, layer: int, state: Tensor) -> Tensor:
    """Logits [v], in float64, after a text whose block output at one layer and position is replaced by a state [m]."""
    blocks = model.transformer.h if model.config.model_type == "gpt2" else model.model.layers

    def replace(module: Any, args: Any, output: Any) -> Any:
        stream = (output[0] if isinstance(output, tuple) else output).clone()
        stream[0, position] = state.to(stream.dtype)
        return (stream, *output[1:]) if isinstance(output, tuple) else stream

    hook = blocks[layer].register_forward_hook(replace)
    try:
        return model(torch.tensor([ids]), use_cache=False).logits[0, -1].double()
    finally:
        hook.remove()


def continued_slowly(model: Any, ids: list[int], position: int, layer: int, state: Tensor, count: int) -> list[int]:
    """The `count` likeliest tokens, each from a forward of the whole text so far, into which the state is inserted."""
    text = list(ids)
    for _ in range(count):
        text.append(int(inserted_slowly(model, text, position, layer, state).argmax()))
    return text[len(ids) :]
