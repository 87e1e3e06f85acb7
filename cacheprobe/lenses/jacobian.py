"""Defines JacobianLens, which reads recorded states through Jacobian matrices that TransformerLens has fitted."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cacheprobe.core.live import LiveModule
from cacheprobe.core.registry import register
from cacheprobe.lenses.base import Lens, LensError, require_made_for, unembedding_sha256
from cacheprobe.models.base import CachedLM
from cacheprobe.ops.by_layer import product_by_layer


@register("lenses", "jacobian")
@dataclass(frozen=True, eq=False)
class JacobianLens:
    """Reads a layer's residual stream h as J h, followed by the model's final norm and unembedding.

    J is the mean derivative of the last layer's output with respect to the layer's output. The last layer has no J and
    gives the model's output. TransformerLens fits and loads such lenses; `of` converts one.
    Source: transformer_lens.tools.analysis.JacobianLens, which defines the product J h and the readout after it.
    Twin: the `readout` of that class, close(1e-5) in float32.
    """

    matrices: Float[Tensor, "l m m"]
    """J of every layer but the last, float32; multiplied from the left."""
    unembedding: str
    """SHA-256 of the unembedding that the lens was made for, from `lenses.base.unembedding_sha256`."""
    about: dict[str, object] = field(default_factory=dict, repr=False)
    """Number of prompts of the fit (n_prompts), and TransformerLens' metadata."""
    name: ClassVar[str] = "jacobian"
    sites: ClassVar[tuple[str, ...]] = ("S",)

    @classmethod
    def fresh(cls, model: CachedLM) -> "Lens":
        """Returns an untrained JacobianLens: all J are the identity, so the lens gives the logits of the logit lens.

        Raises: LensError for a model of one layer.
        """
        if model.n_layers < 2:
            raise LensError(f"{model.name} has one layer, which is its output: there is nothing to transport")
        eye = torch.eye(model.d_model, device=model.device)
        return cls(eye.repeat(model.n_layers - 1, 1, 1), unembedding_sha256(model))

    @classmethod
    def of(cls, theirs: LiveModule, model: LiveModule) -> "JacobianLens":
        """Returns a JacobianLens for `model` from TransformerLens' own JacobianLens `theirs`, fitted or loaded.

        Raises: LensError if `theirs` is another object or lacks the matrix of a layer before the last, or if `model`
        has no bridge or TransformerLens refuses it.
        """
        if not hasattr(theirs, "jacobians"):
            raise LensError(f"expected a JacobianLens of transformer_lens.tools.analysis, got {theirs!r:.60}")
        bridge = getattr(model, "bridge", None)
        if bridge is None:
            raise LensError(f"a Jacobian lens is for a TransformerBridge; {model!r:.60} has none")
        try:
            theirs.validate_model(bridge)
        except (TypeError, ValueError) as error:
            raise LensError(f"TransformerLens refuses this lens for {model.name}: {error}") from error
        if missing := [layer for layer in range(model.n_layers - 1) if layer not in theirs.jacobians]:
            raise LensError(f"the lens has no matrix for layer {missing[0]}; fit all of 0 to {model.n_layers - 2}")
        matrices = torch.stack([theirs.jacobians[layer] for layer in range(model.n_layers - 1)])
        about = {"n_prompts": theirs.n_prompts, "metadata": dict(theirs.metadata)}
        return cls(matrices.to(model.device, torch.float32), unembedding_sha256(model), about)

    def check(self, model: CachedLM) -> None:
        """Raises: LensError if the lens was fitted for another number of layers, another width or unembedding."""
        layers, width = self.matrices.shape[:2]
        require_made_for(model, "Jacobian", layers + 1, width, self.unembedding, "fit one for it")

    def logits(self, model: CachedLM, states: Float[Tensor, "n m"], layers: Int[Tensor, "n"]) -> Float[Tensor, "n v"]:
        """Returns logits [n, v] of residual streams `states` [n, m], each taken after its layer in `layers` [n]."""
        return model.read_out(self.to_residual(states, layers))

    def to_residual(self, states: Float[Tensor, "n m"], layers: Int[Tensor, "n"]) -> Float[Tensor, "n m"]:
        """Returns, for states [n, m] after the layers [n], the matrix products that estimate the last residual stream,
        in the dtype of the states."""
        last = len(self.matrices)
        exact, layers = states.float().to(self.matrices.device), layers.to(self.matrices.device)
        zeros = torch.zeros(last, states.shape[1], device=exact.device)
        moved = product_by_layer(exact, layers.clamp(max=last - 1), self.matrices.transpose(1, 2), zeros)
        return torch.where((layers == last)[:, None], exact, moved).to(states.dtype)
