"""Trains a tuned lens: the translators minimise the KL divergence from the model's own output."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from einops import rearrange, reduce
from jaxtyping import Float
from torch import Tensor, nn

from cacheprobe.core.values import Json
from cacheprobe.lenses.base import Lens, LensError
from cacheprobe.lenses.tuned import TunedLens
from cacheprobe.models.base import CachedLM
from cacheprobe.models.feeding import feed
from cacheprobe.training.loop import Loop, Progress
from cacheprobe.training.tuned_lens.settings import TunedLensSettings

ROWS_AT_ONCE = 256
"""Rows of one vocabulary product, forward and backward: its logits are the largest tensors of a training."""


class States(NamedTuple):
    """Activations of a model on some texts, their tokens one after another."""

    layers: Float[Tensor, "l n m"]
    """The residual stream after every block but the last."""
    output_logprobs_nats: Float[Tensor, "n v"]
    """The model's own log-probabilities."""


def states_of(model: CachedLM, texts: Tensor) -> States:
    """Returns the states of texts [b, t], computed in one forward; n = b x t."""
    sites = [("S", layer) for layer in range(model.n_layers - 1)]
    fed = feed(model, texts, sites)
    layers = torch.stack([fed.states[site].flatten(0, 1) for site in sites])
    return States(layers, fed.out.flatten(0, 1).float().log_softmax(-1))


class TunedLensTrainer:
    """Trains the translators of every layer at once, starting from the identity.

    Source: Belrose et al. 2023 (arXiv 2303.08112), section 3; optimizer as in its tuned-lens package.
    Twin: tests.twins.lenses_slowly.tuned_lens_gradients_slowly, close(1e-4): one layer, one token at a time.
    """

    def __init__(self, model: CachedLM, settings: TunedLensSettings) -> None:
        if model.dtype != torch.float32:
            raise LensError(f"a tuned lens is trained in float32, {model.name} is in {model.dtype}; load it with it")
        self.model, self.settings = model, settings
        start = TunedLens.fresh(model)
        assert isinstance(start, TunedLens)
        self.weights, self.biases = nn.Parameter(start.weights), nn.Parameter(start.biases)
        self.unembedding = start.unembedding
        optimizer = torch.optim.SGD(
            [self.weights, self.biases],
            lr=settings.learning_rate_at(0),
            momentum=settings.momentum,
            nesterov=settings.momentum > 0,
            weight_decay=settings.weight_decay,
        )
        self.loop = Loop({"weights": self.weights, "biases": self.biases}, optimizer, settings)

    def run(self, texts: Tensor) -> Iterator[Progress]:
        """Runs all steps over texts [n, t], `settings.texts` of them at a time; the loss is the mean KL over layers."""
        settings = self.settings
        if len(texts) < settings.texts:
            raise ValueError(f"a step reads {settings.texts} texts, there are {len(texts)}; write more")

        def gradients_of(step: int) -> dict[str, float]:
            """Reads the next texts and computes the gradients."""
            start = step * settings.texts % (len(texts) - len(texts) % settings.texts)
            kl_nats = self.backward(states_of(self.model, texts[start : start + settings.texts]))
            return {"kl_nats": float(kl_nats.mean())}

        return self.loop.run(gradients_of)

    def backward(self, states: States) -> Tensor:
        """Computes gradients of the sum over layers of the mean KL over tokens; returns that mean [l].

        All layers are translated in one batched product; their logits are computed in slices of ROWS_AT_ONCE.
        """
        layers, tokens, _ = states.layers.shape
        moved = states.layers + torch.baddbmm(self.biases[:, None], states.layers, self.weights)
        flat = rearrange(moved.detach(), "l t m -> (l t) m")
        gradient, kl = torch.empty_like(flat), torch.empty(len(flat), device=flat.device)
        for start in range(0, len(flat), ROWS_AT_ONCE):
            some = flat[start : start + ROWS_AT_ONCE].clone().requires_grad_()
            token = torch.arange(start, start + len(some), device=flat.device) % tokens
            each = _kl_nats(self.model.read_out_with_gradients(some), states.output_logprobs_nats[token])
            (gradient[start : start + len(some)],) = torch.autograd.grad(each.sum() / tokens, [some])
            kl[start : start + len(some)] = each.detach()
        moved.backward(gradient.view_as(moved))
        return reduce(kl, "(l t) -> l", "mean", l=layers)

    def lens(self, about: dict[str, Json] | None = None) -> TunedLens:
        """Returns the lens with the current translators."""
        return TunedLens(self.weights.detach().clone(), self.biases.detach().clone(), self.unembedding, about or {})


@torch.inference_mode()
def divergences(model: CachedLM, lens: Lens, texts: Tensor) -> Float[Tensor, "l"]:
    """Returns the mean KL divergence, in nats, from the model's own output to the lens's at every layer but the last.

    texts: [n, t]. The mean is taken over every token of every text.
    """
    total = torch.zeros(model.n_layers - 1, dtype=torch.float64)
    for text in texts:
        states = states_of(model, text[None])
        layer = torch.arange(len(total), device=model.device).repeat_interleave(len(text))
        token = torch.arange(len(text), device=model.device).repeat(len(total))
        rows = zip(
            rearrange(states.layers, "l t m -> (l t) m").split(ROWS_AT_ONCE), layer.split(ROWS_AT_ONCE), strict=True
        )
        logits = (lens.logits(model, vectors, layers) for vectors, layers in rows)
        parts = zip(logits, token.split(ROWS_AT_ONCE), strict=True)
        kl = torch.cat([_kl_nats(some, states.output_logprobs_nats[at]) for some, at in parts])
        total += reduce(kl.double(), "(l t) -> l", "sum", l=len(total)).cpu()
    return total / texts.numel()


def _kl_nats(logits: Float[Tensor, "n v"], output: Float[Tensor, "n v"]) -> Float[Tensor, "n"]:
    """Returns KL(output || softmax(logits)) for each row. A token with output probability 0 adds 0."""
    terms = output.exp() * (output - logits.float().log_softmax(-1))
    return terms.masked_fill(output == -torch.inf, 0.0).sum(-1)
