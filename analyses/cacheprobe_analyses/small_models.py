"""Makes small transformers with random weights, trains them on next tokens, and captures their states with cp.run."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

import cacheprobe as cp
from cacheprobe.models.base import CachedLM
from cacheprobe_analyses.findings.finding import Advance


@dataclass(frozen=True)
class Architecture:
    """Holds the sizes of a GPT-2: learned positions, layer normalisation before each part, embeddings not shared."""

    vocabulary: int
    context: int
    layers: int
    width: int
    heads: int
    inner: int
    activation: str = "relu"
    torch_weights: bool = False
    """First weights as torch draws those of its layers (embeddings with deviation 1); otherwise all normal, with
    deviation 0.8 over the root of the width, as TransformerLens draws them."""


def random_model(of: Architecture, seed: int) -> GPT2LMHeadModel:
    """Returns a GPT-2 with weights drawn by this seed."""
    config = GPT2Config(
        vocab_size=of.vocabulary, n_positions=of.context, n_embd=of.width, n_layer=of.layers, n_head=of.heads,
        n_inner=of.inner, activation_function=of.activation, initializer_range=0.8 / math.sqrt(of.width),
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPT2LMHeadModel(config)
        if of.torch_weights:
            model.apply(_draw_as_torch)
    return model.eval()


@torch.no_grad()
def _draw_as_torch(module: nn.Module) -> None:
    """Draws a layer's weights as torch's own layers do; transformers' Conv1D is a linear layer, transposed."""
    if isinstance(module, nn.Linear | nn.Embedding | nn.LayerNorm):
        module.reset_parameters()
    elif type(module).__name__ == "Conv1D":
        bound = 1 / math.sqrt(module.weight.shape[0])
        module.weight.uniform_(-bound, bound)
        module.bias.uniform_(-bound, bound)


def train(
    model: nn.Module,
    batches: Callable[[int], tuple[Tensor, Tensor]],
    steps: int,
    rate: float,
    advance: Advance,
    decays: bool = True,
    ends: "Callable[[int], bool] | None" = None,
) -> list[float]:
    """Trains a model in place with AdamW on cross-entropy, and returns the loss of each step in nats.

    batches: a step -> token ids [b, t] and the token id after each [b, t], -100 where there is none to learn.
    decays: let the learning rate fall to 0 along a half cosine.
    ends: is asked after each step, with the number of steps so far, whether to stop before the last one.
    """
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.01)
    losses = []
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * (0.5 + 0.5 * math.cos(math.pi * step / steps) if decays else 1.0)
        given, wanted = batches(step)
        loss = functional.cross_entropy(model(given).logits.flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        advance(1)
        if ends is not None and ends(step + 1):
            advance(steps - step - 1)
            break
    model.eval()
    return losses


def capture(model: CachedLM, tokens: np.ndarray) -> dict[int, Tensor]:
    """Returns S (the residual stream after a block) by layer, [n, t, m], for each token of the sequences [n, t].

    The run reads each sequence as a prompt and generates one token, which is not used.
    """
    trace = cp.run(
        model, [row.tolist() for row in tokens], max_new_tokens=1, capture="S", prefill_chunk=tokens.shape[1],
        prefill_group=64, progress=False,
    )  # fmt: skip
    table = trace.row_table.sort_values(["request_id", "position"])
    rows = table[table.role == "prompt"].row.tolist()
    return {layer: trace.vectors("S", layer, rows).reshape(*tokens.shape, -1) for layer in range(trace.model.n_layers)}


@torch.inference_mode()
def log_probabilities(model: CachedLM, states: Tensor) -> Tensor:
    """Returns the log-probability, in nats, of every next token [..., v], from last-layer states [..., m]."""
    return model.read_out(states.flatten(0, -2)).float().log_softmax(-1).unflatten(0, states.shape[:-1])
