"""Trains a tuned lens: translators (affine maps) that minimise the KL divergence from the model's own output."""

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
from cacheprobe.training.loop import Loop, StepReport
from cacheprobe.training.tuned_lens.settings import TunedLensSettings

VECTORS_AT_ONCE = 256
"""Number of vectors in one product with the unembedding."""


class TextStates(NamedTuple):
    """Holds a model's residual stream and output log-probabilities for texts [b, t]. The axis n = b x t counts the
    tokens of all texts, one text after another."""

    layers: Float[Tensor, "l n m"]
    """Residual stream after every block but the last."""
    output_logprobs_nats: Float[Tensor, "n v"]
    """Log-probabilities of the model itself."""


def states_of(model: CachedLM, texts: Tensor) -> TextStates:
    """Runs the model on texts [b, t] in one forward pass; returns the TextStates of their n = b x t tokens."""
    sites = [("S", layer) for layer in range(model.n_layers - 1)]
    fed = feed(model, texts, sites)
    layers = torch.stack([fed.states[site].flatten(0, 1) for site in sites])
    return TextStates(layers, fed.out.flatten(0, 1).float().log_softmax(-1))


class TunedLensTrainer:
    """Trains the translators (affine maps) of all layers but the last together, starting from the identity.

    Source: Belrose et al. 2023 (arXiv 2303.08112), section 3; optimizer as in PyPI's tuned-lens.
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

    def run(self, texts: Tensor) -> Iterator[StepReport]:
        """Returns an iterator over the steps that are left, on texts [n, t]: fetching an item runs one step and gives
        the step's StepReport.

        Each step reads the next `settings.texts` texts; after the last whole batch, the first texts again. The loss in
        a StepReport, kl_nats, is the mean over layers.
        Raises: ValueError, at the call, for fewer texts than a step reads.
        """
        settings = self.settings
        if len(texts) < settings.texts:
            raise ValueError(f"a step reads {settings.texts} texts, there are {len(texts)}; write more")

        def gradients_of(step: int) -> dict[str, float]:
            """Computes the gradients of step `step` on the next texts; returns the mean KL divergence as `kl_nats`."""
            start = step * settings.texts % (len(texts) - len(texts) % settings.texts)
            kl_nats = self.backward(states_of(self.model, texts[start : start + settings.texts]))
            return {"kl_nats": float(kl_nats.mean())}

        return self.loop.run(gradients_of)

    def backward(self, states: TextStates) -> Tensor:
        """Computes the gradients of the loss for `states`, a TextStates. Returns [l]: for each layer but the last, the
        mean KL divergence over tokens, in nats. The loss is the sum of these means."""
        layers, tokens, _ = states.layers.shape
        moved = states.layers + torch.baddbmm(self.biases[:, None], states.layers, self.weights)
        flat = rearrange(moved.detach(), "l t m -> (l t) m")
        gradient, kl = torch.empty_like(flat), torch.empty(len(flat), device=flat.device)
        for start in range(0, len(flat), VECTORS_AT_ONCE):
            part = flat[start : start + VECTORS_AT_ONCE].clone().requires_grad_()
            token = torch.arange(start, start + len(part), device=flat.device) % tokens
            part_kl = _kl_nats(self.model.read_out_with_gradients(part), states.output_logprobs_nats[token])
            (gradient[start : start + len(part)],) = torch.autograd.grad(part_kl.sum() / tokens, [part])
            kl[start : start + len(part)] = part_kl.detach()
        moved.backward(gradient.view_as(moved))
        return reduce(kl, "(l t) -> l", "mean", l=layers)

    def lens(self, about: dict[str, Json] | None = None) -> TunedLens:
        """Returns a TunedLens with a copy of the current translators. about: metadata to store with the lens."""
        return TunedLens(self.weights.detach().clone(), self.biases.detach().clone(), self.unembedding, about or {})


@torch.inference_mode()
def divergences(model: CachedLM, lens: Lens, texts: Tensor) -> Float[Tensor, "l"]:
    """Returns [l]: for each layer but the last, the mean KL divergence of the lens from the model's own output, in
    nats.

    texts: token ids [n, t]. The mean is taken over all tokens.
    """
    total = torch.zeros(model.n_layers - 1, dtype=torch.float64)
    for text in texts:
        states = states_of(model, text[None])
        layer = torch.arange(len(total), device=model.device).repeat_interleave(len(text))
        token = torch.arange(len(text), device=model.device).repeat(len(total))
        vectors = rearrange(states.layers, "l t m -> (l t) m").split(VECTORS_AT_ONCE)
        parts = zip(vectors, layer.split(VECTORS_AT_ONCE), token.split(VECTORS_AT_ONCE), strict=True)
        outputs = states.output_logprobs_nats
        kl = torch.cat([_kl_nats(lens.logits(model, part, layers), outputs[tokens]) for part, layers, tokens in parts])
        total += reduce(kl.double(), "(l t) -> l", "sum", l=len(total)).cpu()
    return total / texts.numel()


def _kl_nats(logits: Float[Tensor, "n v"], output: Float[Tensor, "n v"]) -> Float[Tensor, "n"]:
    """Returns [n]: KL(output || softmax(logits)) in nats. output: log-probabilities."""
    terms = output.exp() * (output - logits.float().log_softmax(-1))
    return terms.masked_fill(output == -torch.inf, 0.0).sum(-1)
