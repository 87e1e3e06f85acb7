"""Names a lens by its settings, tensors and functions, so that a stored run is read on by the same lens alone."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import TYPE_CHECKING

from torch import Tensor, nn

from cacheprobe.core.values import source_sha256

if TYPE_CHECKING:
    from cacheprobe.lenses.base import Lens

_DEEPEST = 8
"""How many values inside values are looked at."""


def lens_identity(lens: "Lens") -> str:
    """Returns text that names a lens with its settings, and with the SHA-256 of its tensors and functions.

    Two lenses with one text read the states of one model alike, unless they read what the text leaves out: global
    variables of a function, private attributes (such as caches), and objects that say nothing of themselves.
    """
    attributes = vars(lens) if hasattr(lens, "__dict__") else {}
    shown = {name: value for name, value in attributes.items() if name[0] != "_"}
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
