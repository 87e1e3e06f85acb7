"""Defines TunedLens: a trained affine translator for every layer, followed by the model's own unembedding."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cacheprobe.core.registry import register
from cacheprobe.core.values import Json
from cacheprobe.lenses.base import Lens, LensError, require_made_for, unembedding_sha256
from cacheprobe.lenses.tuned_files import Translators, load_tuned_lens, save_tuned_lens
from cacheprobe.models.base import CachedLM
from cacheprobe.ops.by_layer import product_by_layer


@register("lenses", "tuned")
@dataclass(frozen=True, eq=False)
class TunedLens:
    """Reads a layer's residual stream h as h + h W + b, followed by the model's final norm and unembedding.

    W and b are trained for each layer. The last layer has no translator and gives the model's output. With zero W and b
    the lens equals the logit lens. The sum is computed in float32 and rounded to the model's dtype.
    Source: Belrose et al. 2023 (arXiv 2303.08112), section 3, in the residual form of its tuned-lens package.
    Twin: tests.twins.lenses_slowly.tuned_logits_slowly, close(1e-5) in float32.
    """

    weights: Float[Tensor, "l m m"]
    """W of every layer but the last, float32; multiplied from the right."""
    biases: Float[Tensor, "l m"]
    """b of every layer but the last, float32."""
    unembedding: str
    """SHA-256 of the unembedding that the lens was made for, from `lenses.base.unembedding_sha256`."""
    about: dict[str, Json] = field(default_factory=dict, repr=False)
    """Training settings and results, as stored in config.json."""
    name: ClassVar[str] = "tuned"
    sites: ClassVar[tuple[str, ...]] = ("S",)

    def __post_init__(self) -> None:
        layers, width = len(self.weights), self.weights.shape[-1]
        shapes = (tuple(self.weights.shape), tuple(self.biases.shape))
        if not layers or shapes != ((layers, width, width), (layers, width)):
            raise LensError(f"a tuned lens has weights [l, m, m] and biases [l, m] for l >= 1, got {shapes}")

    def __repr__(self) -> str:
        layers, width = self.biases.shape
        return f"TunedLens({layers} translators, d_model {width}, unembedding {self.unembedding[:12]})"

    @classmethod
    def fresh(cls, model: CachedLM) -> "Lens":
        """Returns an untrained TunedLens: all W and b are zero, so the lens gives the logits of the logit lens.

        Raises: LensError for a model of one layer.
        """
        layers, width = model.n_layers - 1, model.d_model
        if not layers:
            raise LensError(f"{model.name} has one layer, which is its output: there is nothing to translate")
        weights, biases = torch.zeros(layers, width, width), torch.zeros(layers, width)
        return cls(weights.to(model.device), biases.to(model.device), unembedding_sha256(model))

    @classmethod
    def load(cls, directory: "str | Path", model: CachedLM) -> "TunedLens":
        """Returns the TunedLens saved in a directory by `cacheprobe train tuned-lens`, or by AlignmentResearch's
        package tuned-lens.

        Raises: LensError for a directory without a tuned lens, with a broken one, or with a lens of another model.
        """
        lens = cls(*load_tuned_lens(Path(directory), model))
        lens.check(model)
        return lens

    def save(self, directory: "str | Path") -> Path:
        """Writes translators.safetensors and config.json into a directory, and returns its path."""
        return save_tuned_lens(Translators(self.weights, self.biases, self.unembedding, self.about), Path(directory))

    def check(self, model: CachedLM) -> None:
        """Raises: LensError if the lens was trained for another number of layers, another width or unembedding."""
        layers, width = self.biases.shape
        remedy = "train one with cacheprobe train tuned-lens"
        require_made_for(model, "tuned", layers + 1, width, self.unembedding, remedy)

    def logits(self, model: CachedLM, states: Float[Tensor, "n m"], layers: Int[Tensor, "n"]) -> Float[Tensor, "n v"]:
        """Returns logits [n, v] of residual streams `states` [n, m], each taken after its layer in `layers` [n]."""
        return model.read_out(self.to_residual(states, layers))

    def to_residual(self, states: Float[Tensor, "n m"], layers: Int[Tensor, "n"]) -> Float[Tensor, "n m"]:
        """Returns h + h W + b for each of `states` [n, m], in their dtype. States of the last layer are unchanged."""
        last = len(self.weights)
        exact = states.float()
        moved = product_by_layer(exact, layers.clamp(max=last - 1), self.weights, self.biases)
        return (exact + moved.masked_fill((layers == last)[:, None], 0.0)).to(states.dtype)
