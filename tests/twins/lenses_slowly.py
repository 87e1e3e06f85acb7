"""Slow twins of the lenses, of their training and of patchscopes: one row, one layer and one token at a time."""

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import kl_div

from cacheprobe.lenses.tuned import TunedLens
from cacheprobe.models.base import CachedLM
from cacheprobe.models.thinking.lm import ThinkingLM
from tests.by_hand import changed, forward


def product_by_layer_slowly(states: Tensor, layers: Tensor, weights: Tensor, biases: Tensor) -> Tensor:
    """Each row by the matrix of its layer, in float64."""
    product = torch.einsum("nm,nmk->nk", states.double(), weights[layers].double())
    return (product + biases[layers].double()).to(states.dtype)


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
        said = [
            model.read_out_with_gradients((s + weights[layer].T @ s + biases[layer])[None])[0] for s in states[layer]
        ]
        kl.append(kl_div(torch.stack(said).log_softmax(-1), output, reduction="batchmean", log_target=True))
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
    with changed(blocks[layer], lambda states: states[0, position].copy_(state)):
        return forward(model, ids)[0][-1].double()


def continued_slowly(model: Any, ids: list[int], position: int, layer: int, state: Tensor, count: int) -> list[int]:
    """The `count` likeliest tokens, each from a forward of the whole text so far, into which the state is inserted."""
    text = list(ids)
    for _ in range(count):
        text.append(int(inserted_slowly(model, text, position, layer, state).argmax()))
    return text[len(ids) :]
