"""What every lens offers, and what is asked of one before it reads."""

import hashlib
from collections.abc import Iterable
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from cacheprobe.core.hook_names import SITES
from cacheprobe.models.base import CachedLM


class LensError(ValueError):
    """A lens that cannot read what it was given; the message names the remedy."""


@runtime_checkable
class Lens(Protocol):
    """Reads states [n, m] of any layers as logits [n, v] in the model's own dtype, all layers in one product."""

    name: ClassVar[str]
    sites: ClassVar[tuple[str, ...]]
    """Of S, T and C: those that it reads."""

    @classmethod
    def fresh(cls, model: CachedLM) -> "Lens":
        """A lens of this kind for this model, as it is before any training."""
        ...

    def check(self, model: CachedLM) -> None:
        """Raises: LensError where this lens was made for another model."""
        ...

    def logits(self, model: CachedLM, states: Tensor, layers: Tensor) -> Tensor:
        """states: [n, m], one vector a row; layers: [n], the block at which each stood. Returns [n, v].

        A row's logits depend on that row and its layer alone, in whatever company it is read. At the last layer S
        gives the model's own output.
        """
        ...


def require_readable(lens: Any, model: CachedLM, site: str, layers: Iterable[int]) -> None:
    """Raises: LensError unless `lens` is a lens that reads these layers of `site` in this model."""
    missing = [part for part in ("name", "sites", "check", "logits") if not hasattr(lens, part)]
    if isinstance(lens, type) or missing:
        lacks = f", which has no {missing[0]}" if missing and not isinstance(lens, type) else ""
        raise LensError(f"a lens is an object such as cp.lenses.LogitLens(), got {lens!r:.60}{lacks}")
    if site not in SITES:
        raise LensError(f"unknown site {site!r} for a lens; sites are {', '.join(SITES)}")
    if site not in lens.sites:
        raise LensError(
            f"the {lens.name} lens reads {', '.join(lens.sites)}, not {site}; read {site} with cp.lenses.LogitLens()"
        )
    if unknown := [layer for layer in layers if not 0 <= layer < model.n_layers]:
        raise LensError(f"unknown layer {unknown[0]} for a lens; {model.name} has layers 0 to {model.n_layers - 1}")
    lens.check(model)


def require_made_for(model: CachedLM, kind: str, layers: int, width: int, unembedding: str, remedy: str) -> None:
    """Raises: LensError for a model of other shape, or with another unembedding, than a lens was made for.

    kind, remedy: what the lens is called, and what to do.
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
    """Hash of the unembedding's shape and numbers in float32: equal for one model loaded in float32 or wider storage.

    A lens keeps it, since a translation into one vocabulary means nothing in another.
    """
    weight = model.unembedding.detach().to("cpu", torch.float32).contiguous()
    digest = hashlib.sha256(f"{tuple(weight.shape)}".encode())
    digest.update(weight.numpy().data.cast("B"))
    return digest.hexdigest()
