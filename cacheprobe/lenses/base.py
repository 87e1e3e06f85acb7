"""Defines the interface of a lens, and the checks before a lens reads states."""

import hashlib
from collections.abc import Iterable
from typing import ClassVar, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from cacheprobe.core.hook_names import SITES
from cacheprobe.core.values import repr_of_settings
from cacheprobe.models.base import CachedLM


class LensError(ValueError):
    """Raised if a lens does not fit a model, a site or a layer, fails on states, or cannot be loaded."""


@runtime_checkable
class Lens(Protocol):
    """Maps states [n, m], each from any layer, to logits [n, v] over the vocabulary. A class that is derived from this
    one must define `name` and `logits` alone."""

    name: ClassVar[str]
    sites: ClassVar[tuple[str, ...]] = ("S",)
    """The sites that the lens can read: one or more of S, T and C."""

    @classmethod
    def fresh(cls, model: CachedLM) -> "Lens":
        """Returns an untrained lens of this kind for this model."""
        return cls()

    def check(self, model: CachedLM) -> None:
        """Raises: LensError if this lens was made for another model. By default it reads every model."""

    def __repr__(self) -> str:
        """Returns the name of the class and its settings, as a run stores them."""
        return repr_of_settings(self)

    def logits(self, model: CachedLM, states: Tensor, layers: Tensor) -> Tensor:
        """Returns logits [n, v] of states [n, m], one for each state. layers: [n], the layer that each state is from.

        The logits of a state must not depend on the other states. For S of the last layer they are the model's output.
        """
        ...


def require_readable(lens: object, model: CachedLM, site: str, layers: Iterable[int]) -> None:
    """Raises: LensError unless `lens` is a lens that can read these layers of `site` in this model."""
    missing = [part for part in ("name", "sites", "check", "logits") if not hasattr(lens, part)]
    if isinstance(lens, type) or missing:
        lacks = f", which has no {missing[0]}" if missing and not isinstance(lens, type) else ""
        raise LensError(f"a lens is an object such as cp.lenses.LogitLens(), got {lens!r:.60}{lacks}")
    if site not in SITES:
        raise LensError(f"unknown site {site!r} for a lens; sites are {', '.join(SITES)}")
    lens = cast(Lens, lens)
    if site not in lens.sites:
        raise LensError(
            f"the {lens.name} lens reads {', '.join(lens.sites)}, not {site}; read {site} with cp.lenses.LogitLens()"
        )
    if unknown := [layer for layer in layers if not 0 <= layer < model.n_layers]:
        raise LensError(f"unknown layer {unknown[0]} for a lens; {model.name} has layers 0 to {model.n_layers - 1}")
    lens.check(model)


def require_made_for(model: CachedLM, kind: str, layers: int, width: int, unembedding: str, remedy: str) -> None:
    """Raises: LensError if a lens was made for a model with another number of layers, width or unembedding.

    layers, width, unembedding: of the model that the lens was made for; the last is an `unembedding_sha256`.
    kind, remedy: for the message: the lens's name, and what the user should do.
    """
    if (layers, width) != (model.n_layers, model.d_model):
        raise LensError(
            f"this {kind} lens is for {layers} layers of width {width}, {model.name} has {model.n_layers} of "
            f"{model.d_model}; {remedy}"
        )
    if (here := unembedding_sha256(model)) != unembedding:
        raise LensError(
            f"this {kind} lens was made for the unembedding {unembedding[:12]}, {model.name} has {here[:12]}; {remedy}"
        )


def unembedding_sha256(model: CachedLM) -> str:
    """Returns the SHA-256, as hex text, of the shape and float32 numbers of a model's unembedding matrix.

    A trained lens stores this hash, which stays the same if a float32 model is loaded in float64.
    """
    weight = model.unembedding.detach().to("cpu", torch.float32).contiguous()
    digest = hashlib.sha256(f"{tuple(weight.shape)}".encode())
    digest.update(weight.numpy().data.cast("B"))
    return digest.hexdigest()
