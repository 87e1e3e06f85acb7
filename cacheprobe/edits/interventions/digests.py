"""Digests a user's function for the fingerprint: its code, and the values that it uses."""

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodDescriptorType, MethodType, ModuleType

import numpy as np
import torch
from torch import Tensor

from cacheprobe.core.values import source_sha256

_BUILT_IN = (ModuleType, BuiltinFunctionType, MethodDescriptorType, np.ufunc)
"""Held by name."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), slice, torch.dtype, torch.device)


def function_digest(function: Callable[..., object]) -> tuple[str, str]:
    """Returns (SHA-256 of a function, "" or the first value that it does not hold, as text such as "its variable x, a
    Lock").

    Held are the function's name and source, and by value what it uses: its defaults, closure, globals and arguments of
    `partial`, if they are numbers, texts, tensors, arrays, functions, or lists, dicts and objects of these. Functions
    and classes of installed libraries are held by name.
    """
    digest = _Digest()
    digest.add("itself", function)
    return digest.sha.hexdigest(), digest.unnamed


class _Digest:
    """Hashes values one after the other."""

    def __init__(self) -> None:
        self.sha, self.unnamed = hashlib.sha256(), ""
        self._seen: dict[int, object] = {}
        """By id, the values that were hashed; kept, so that no other value gets the id of one."""

    def add(self, name: str, value: object) -> None:
        """Hashes a value under a name. Notes the first one of which nothing says whether another is equal."""
        self._say(name, type(value).__qualname__)
        if isinstance(value, _PLAIN):
            return self._say(repr(value))
        if id(value) in self._seen:
            return self._say(str(list(self._seen).index(id(value))))
        self._seen[id(value)] = value
        if isinstance(value, Tensor | np.ndarray | np.generic):
            array = value.detach().cpu() if isinstance(value, Tensor) else torch.from_numpy(np.asarray(value))
            self._say(str(array.dtype), str(list(array.shape)))
            self.sha.update(array.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        elif isinstance(value, _BUILT_IN):
            self._say(value.__name__)
        elif isinstance(value, type | FunctionType) and _is_installed(value.__module__):
            self._say(value.__module__, value.__qualname__)
        elif isinstance(value, Mapping):
            for key, one in value.items():
                self.add(f"{name}[{key!r:.40}]", one)
        elif isinstance(value, Sequence):
            for i, one in enumerate(value):
                self.add(f"{name}[{i}]", one)
        elif isinstance(value, FunctionType):
            self._add_function(value)
        elif isinstance(value, MethodType):
            self.add("function", value.__func__)
            self.add("self", value.__self__)
        elif isinstance(value, partial):
            self.add("function", value.func)
            self.add("arguments", value.args)
            self.add("keywords", value.keywords)
        elif isinstance(value, type):
            self._say(value.__module__, source_sha256(value))
        elif hasattr(value, "__dict__") and not isinstance(value, type(iter([]))):
            self.add("class", type(value))
            self.add(f"the attributes of {name}", vars(value))
        else:
            self.unnamed = self.unnamed or f"its variable {name}, a {type(value).__name__}"

    def _add_function(self, function: FunctionType) -> None:
        """Hashes a function of Python code: name, source, defaults, and the variables that it uses."""
        self._say(function.__module__, function.__qualname__, source_sha256(function))
        self.add("defaults", function.__defaults__)
        self.add("keyword defaults", function.__kwdefaults__)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self.add(name, cell.cell_contents)
        for name in _names_in(function.__code__):
            if name in function.__globals__:
                self.add(name, function.__globals__[name])

    def _say(self, *texts: str) -> None:
        for text in texts:
            self.sha.update(text.encode() + b"\0")


def _names_in(code: CodeType) -> list[str]:
    """Returns the names that code and the functions inside it use, sorted."""
    inside = [name for one in code.co_consts if isinstance(one, CodeType) for name in _names_in(one)]
    return sorted({*code.co_names, *inside})


def _is_installed(module: str) -> bool:
    """Returns whether a module is of the standard library, of cacheprobe or of an installed package."""
    top = module.split(".")[0]
    if top == "cacheprobe" or (top in sys.stdlib_module_names and top != "__main__"):
        return True
    return "-packages" in str(vars(sys.modules[module]).get("__file__")) if module in sys.modules else False
