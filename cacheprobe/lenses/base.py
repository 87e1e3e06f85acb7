"""Defines the interface of a lens, and the checks before a lens reads states. Names a lens by its settings, tensors and
functions, so that a stored run is read on by the same lens alone."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import ClassVar, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from cacheprobe.core.hook_names import SITES
from cacheprobe.core.values import repr_of_settings, source_sha256
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


_DEEPEST = 8
"""How many values inside values are looked at."""


def lens_identity(lens: Lens) -> str:
    """Returns text that names a lens with its settings, and with the SHA-256 of its tensors and functions.

    Two lenses with one text read the states of one model alike, unless they read what the text leaves out: global
    variables of a function, private attributes (such as caches), and objects that say nothing of themselves.
    """
    own = vars(lens) if hasattr(lens, "__dict__") else {}
    shown = {name: value for name, value in own.items() if name[0] != "_"}
    declared = fields(lens) if is_dataclass(lens) else ()
    named = {item.name: getattr(lens, item.name) for item in declared if item.name[0] != "_"}
    hidden = {item.name for item in declared if not item.repr}
    values = {name: value for name, value in {**shown, **named}.items() if name not in hidden or _has_numbers(value)}
    return f"{type(lens).__name__}({', '.join(f'{name}={said(value)}' for name, value in values.items())})"


def said(value: object, depth: int = 0) -> str:
    """Returns text for a setting of a lens, the same in every process: of tensors, modules and functions a SHA-256."""
    if depth > _DEEPEST:
        return type(value).__name__
    if isinstance(value, Tensor):
        return tensors_sha256(value)
    if isinstance(value, nn.Module):
        return _joined(repr(value), *(f"{name}={said(one)}" for name, one in value.state_dict().items()))
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {said(one, depth + 1)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        inside = ", ".join(said(one, depth + 1) for one in value)
        return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    if callable(value) and not isinstance(value, type):
        return _joined(_plain_sha256(value), *(said(one, depth + 1) for one in _held_by(value)))
    return type(value).__name__ if type(value).__repr__ is object.__repr__ else repr(value)


def tensors_sha256(*tensors: Tensor) -> str:
    """Returns the SHA-256, as hex text, of the shapes and numbers of tensors; those of a narrow dtype as float32."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tuple(tensor.shape)}".encode())
        wide = tensor.detach().to("cpu")
        wide = wide.float() if wide.is_floating_point() and wide.itemsize < 4 else wide
        digest.update(wide.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _plain_sha256(function: Callable[..., object]) -> str:
    """Returns the SHA-256 of the source of the function inside a partial or a bound method."""
    while isinstance(function, partial | MethodType):
        function = function.func if isinstance(function, partial) else function.__func__
    return source_sha256(function)


def _held_by(function: object) -> list[object]:
    """Returns the values that a function holds: arguments of a partial, the closure, defaults, attributes."""
    if isinstance(function, partial):
        return [list(function.args), dict(sorted(function.keywords.items())), *_held_by(function.func)]
    if isinstance(function, MethodType):
        return [vars(function.__self__) if hasattr(function.__self__, "__dict__") else function.__self__]
    if isinstance(function, FunctionType):
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        return [cells, function.__defaults__, function.__kwdefaults__]
    return [vars(function) if hasattr(function, "__dict__") else None]


def _has_numbers(value: object) -> bool:
    """Whether a value is a tensor or holds some, directly."""
    if isinstance(value, Mapping):
        return any(isinstance(one, Tensor) for one in value.values())
    if isinstance(value, list | tuple):
        return any(isinstance(one, Tensor) for one in value)
    return isinstance(value, Tensor | nn.Module)


def _joined(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()
