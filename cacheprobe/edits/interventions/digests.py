"""Digests a user's function for the fingerprint: its code, and the values that it uses."""

import dis
import hashlib
import logging
import os
import re
import sys
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import cached_property, partial
from importlib.util import find_spec
from operator import attrgetter, itemgetter, methodcaller
from pathlib import PurePath
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GenericAlias,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    UnionType,
    WrapperDescriptorType,
)

import numpy as np
import torch
from torch import Tensor

_PLAIN = (
    bool, float, complex, str, bytes, bytearray, type(None), type(...), type(NotImplemented), range, date, time,
    timedelta, Decimal, Fraction, PurePath, torch.dtype, torch.device, torch.layout, torch.memory_format, np.dtype,
    re.Pattern, GenericAlias, UnionType,
)  # fmt: skip
"""Types whose text says the whole value."""
_IN_C = (MethodDescriptorType, MemberDescriptorType, GetSetDescriptorType, WrapperDescriptorType, np.ufunc)
"""Types of code in C; the name says which one it is."""
_SEQUENCES = (list, tuple, deque)
_MAPPINGS = (dict, MappingProxyType)
_CONTAINERS = (*_SEQUENCES, *_MAPPINGS, set, frozenset, defaultdict, OrderedDict, torch.Size)
"""Types that hold their entries, and nothing else that matters."""
_MOST_LEVELS = 100
"""Values that are nested deeper are not hashed."""
_LEFT_OUT = frozenset(
    "__dict__ __weakref__ __doc__ __module__ __qualname__ __annotations__ __slots__ __abstractmethods__ _abc_impl "
    "__dataclass_fields__ __dataclass_params__ __parameters__ __orig_bases__ __firstlineno__ __static_attributes__ "
    "__annotate_func__ __annotations_cache__".split()
)
"""Attributes of a class that do not change what its methods do."""


def function_digest(function: Callable[..., object]) -> tuple[str, str]:
    """Returns (SHA-256 of a function, name of the first value that the hash could not include). The name is text such
    as "its variable x, a Lock", and "" if the hash includes every value.

    The hash includes the function's compiled code and the present values that it uses: defaults, closure, globals, and
    arguments of `partial`. Values may be numbers, texts, dates, tensors, arrays, lists, dicts, sets, traces, modules of
    torch, and objects and classes of the user's with their methods. Functions, classes and modules of Python and of
    installed packages are included by name. Never raises an error for a value.
    """
    digest = _Digest()
    digest.add("self", function)
    return digest.sha.hexdigest(), digest.unnamed


class _Digest:
    """Hashes values one after the other."""

    def __init__(self) -> None:
        self.sha, self.unnamed = hashlib.sha256(), ""
        self._seen: dict[int, tuple[int, object]] = {}
        """Id of each hashed value -> (its number, the value). The value is kept so that its id stays in use."""
        self._level = 0

    def add(self, name: str, value: object) -> None:
        """Adds a name and a value to the hash. If the value cannot be hashed, sets `unnamed`, unless it is set
        already."""
        name = name if len(name) < 80 else f"{name[:77]}..."
        self._say(name, type(value).__qualname__)
        self._level += 1
        try:
            if self._level > _MOST_LEVELS or not self._add_known(name, value):
                self._give_up(name, value)
        except Exception:  # a value of any kind, whose own code may fail
            self._give_up(name, value)
        finally:
            self._level -= 1

    def _give_up(self, name: str, value: object) -> None:
        """Notes that the hash does not include this value."""
        self.unnamed = self.unnamed or f"its variable {name}, a {type(value).__name__}"

    def _add_known(self, name: str, value: object) -> bool:
        """Hashes a value by its kind. Returns False if it is of no known kind."""
        if isinstance(value, int) and not isinstance(value, bool):
            self._say(hex(value))  # decimal digits are limited in number
            return True
        if isinstance(value, _PLAIN) or type(value).__module__ == "typing":
            self._say(repr(value))
            return True
        if not isinstance(value, tuple | frozenset):  # equal constants may be one object or two
            if id(value) in self._seen:
                self._say(str(self._seen[id(value)][0]))
                return True
            self._seen[id(value)] = len(self._seen), value
        if isinstance(value, Tensor):
            return self._add_tensor(value)
        if isinstance(value, np.ndarray | np.generic):
            return self._add_array(name, value)
        if isinstance(value, (*_CONTAINERS, array)):
            return self._add_entries(name, value)
        return self._add_code_like(name, value) or self._add_object(name, value)

    def _add_tensor(self, tensor: Tensor) -> bool:
        """Hashes a tensor's dtype, shape and numbers. Returns False for a sparse one."""
        if tensor.layout != torch.strided:
            return False
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        self._say(str(plain.dtype), str(list(plain.shape)))
        self.sha.update(plain.flatten().view(torch.uint8).numpy().tobytes())
        return True

    def _add_array(self, name: str, value: "np.ndarray | np.generic") -> bool:
        """Hashes a NumPy array or scalar: dtype, shape and entries, and the mask of a masked array."""
        plain = np.asarray(value)
        self._say(str(plain.dtype), plain.dtype.str, str(plain.shape))
        if plain.dtype.kind in "OV":  # objects, or fields with bytes between them that mean nothing
            self.add(f"{name}[...]", plain.ravel().tolist())
        else:
            self.sha.update(np.ascontiguousarray(plain).tobytes())
        if hasattr(value, "__dict__"):
            self.add(name, vars(value))
        return True

    def _add_entries(self, name: str, value: object) -> bool:
        """Hashes the entries of a list, dict, set or array, and the attributes of an object of a subclass."""
        if isinstance(value, array):
            self._say(value.typecode, value.tobytes().hex())
        elif isinstance(value, _MAPPINGS):
            for i, (key, one) in enumerate(value.items()):
                label = repr(key) if isinstance(key, str) else str(i)
                self.add(f"a key of {name}", key)
                self.add(f"{name}[{label}]", one)
        elif isinstance(value, set | frozenset):
            self._say(*sorted(self._apart(f"an entry of {name}", one) for one in value))
        elif isinstance(value, _SEQUENCES):
            for i, one in enumerate(value):
                self.add(f"{name}[{i}]", one)
        if isinstance(value, defaultdict):
            self.add(f"{name}.default_factory", value.default_factory)
        if isinstance(value, deque):
            self.add(f"{name}.maxlen", value.maxlen)
        if type(value) not in _CONTAINERS and type(value) is not array:
            self.add("class", type(value))
            self._add_attributes(name, value)
        return True

    def _apart(self, name: str, value: object) -> str:
        """Returns the SHA-256 of one entry of a set, which has no order."""
        other = _Digest()
        other._seen, other._level, other.unnamed = dict(self._seen), self._level, self.unnamed
        other.add(name, value)
        self.unnamed = other.unnamed
        return other.sha.hexdigest()

    def _add_code_like(self, name: str, value: object) -> bool:
        """Hashes a function, class, module, or what is made of functions. Returns False for anything else."""
        if isinstance(value, ModuleType):
            self._say(value.__name__)
            return _is_installed(value.__name__)
        if isinstance(value, BuiltinFunctionType):
            self._say(str(value.__module__), value.__qualname__)
            if not isinstance(value.__self__, ModuleType | type | None):
                self.add(f"{name}.__self__", value.__self__)
        elif isinstance(value, _IN_C) or type(value).__name__ == "cython_function_or_method":
            self._say(value.__qualname__ if hasattr(value, "__qualname__") else value.__name__)  # type: ignore[attr-defined]
        elif isinstance(value, FunctionType):
            self._add_function(value)
        elif isinstance(value, type):
            self._add_class(value)
        elif isinstance(value, MethodType):
            self.add("function", value.__func__)
            self.add("self", value.__self__)
        elif isinstance(value, partial):
            self.add("function", value.func)
            self.add("arguments", value.args)
            self.add("keywords", value.keywords)
        elif isinstance(value, staticmethod | classmethod):
            self.add(name, value.__func__)
        elif isinstance(value, property):
            self.add(name, (value.fget, value.fset, value.fdel))
        elif isinstance(value, cached_property):
            self.add(name, value.func)
        elif type(value).__name__ == "_lru_cache_wrapper":
            self.add(name, value.__wrapped__)  # type: ignore[attr-defined]
        elif isinstance(value, slice):
            self.add(name, (value.start, value.stop, value.step))
        elif isinstance(value, itemgetter | attrgetter | methodcaller) or type(value).__name__ == "_tuplegetter":
            self.add(name, value.__reduce__()[1])
        elif isinstance(value, logging.Logger):
            self._say(value.name)
        else:
            return False
        return True

    def _add_object(self, name: str, value: object) -> bool:
        """Hashes an object by its class and attributes, and a Trace by its requests' results. Returns False if it may
        have a state outside of its attributes, as objects of classes in C have."""
        kind = type(value)
        if kind.__module__.startswith("cacheprobe.") and hasattr(kind, "digest"):
            self._say(kind.__qualname__, repr(getattr(value, "fingerprint", "")))
            if not hasattr(value, "requests"):
                self._say(value.digest())  # type: ignore[attr-defined]
                return True
            for request in value.requests:  # type: ignore[attr-defined]
                self._say(value.digest(request.request_id))  # type: ignore[attr-defined]
            return True
        own = object.__basicsize__ + 8 * len(_slots_of(kind))
        own += 8 * (kind.__weakrefoffset__ > 0) + 8 * (kind.__dictoffset__ > 0)
        if kind.__basicsize__ > own or kind.__itemsize__:
            return False
        self.add("class", kind)
        self._add_attributes(name, value)
        return True

    def _add_attributes(self, name: str, value: object) -> None:
        """Hashes the attributes of an object: those of `__dict__` and those in slots."""
        for attribute, one in list(vars(value).items() if hasattr(value, "__dict__") else ()):
            self.add(f"{name}.{attribute}", one)
        for attribute in _slots_of(type(value)):
            if hasattr(value, attribute):
                self.add(f"{name}.{attribute}", getattr(value, attribute))

    def _add_class(self, kind: type) -> None:
        """Hashes a class by name, and one of the user's also by its methods, attributes and base classes."""
        self._say(kind.__module__, kind.__qualname__)
        if _is_installed(kind.__module__):
            return
        if type(kind) is not type:
            self.add("metaclass", type(kind))
        for base in kind.__mro__[1:]:
            self.add("base", base)
        for attribute, value in vars(kind).items():
            if attribute not in _LEFT_OUT:
                self.add(f"{kind.__name__}.{attribute}", value)
        if issubclass(kind, Enum):
            self._say(*kind.__members__)

    def _add_function(self, function: FunctionType) -> None:
        """Hashes a function of Python code: name, code, defaults, and the variables that it uses. Of an installed
        function only the name, and the variables if another function made it."""
        code = function.__code__
        self._say(str(function.__module__), function.__qualname__)
        is_installed = _is_installed(function.__globals__.get("__name__"))
        if is_installed and "<locals>" not in code.co_qualname:
            return
        self.add("defaults", function.__defaults__)
        self.add("keyword defaults", function.__kwdefaults__)
        names = _names_in(code)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:
                self._say(name, "not assigned yet")
                continue
            self._add_variable(name, value, names)
        if is_installed:
            return
        self._add_code(code)
        for name in _named_by(code, _OF_GLOBALS):
            if name in function.__globals__:
                self._add_variable(name, function.__globals__[name], names)
        for name in _named_by(code, ("IMPORT_NAME",)):
            if not _is_installed(name):
                self.unnamed = self.unnamed or f"the module {name or 'next to it'}, which it imports"

    def _add_variable(self, name: str, value: object, names: Sequence[str], above: tuple[object, ...] = ()) -> None:
        """Hashes a variable of a function. Of a module of the user's, hashes those of its variables that `names`, all
        names in the function's code, has. above: modules that hold the value."""
        if not isinstance(value, ModuleType) or _is_installed(value.__name__):
            return self.add(name, value)
        self._say(name, value.__name__)
        for inner in names:
            if inner in vars(value) and value not in above:
                self._add_variable(f"{name}.{inner}", vars(value)[inner], names, (*above, value))

    def _add_code(self, code: CodeType) -> None:
        """Hashes a compiled function: its instructions, constants and names."""
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        self._say(code.co_code.hex(), code.co_exceptiontable.hex(), repr(names), repr(counts))
        for one in code.co_consts:
            if isinstance(one, CodeType):
                self._add_code(one)
            else:
                self.add("constant", one)

    def _say(self, *texts: str) -> None:
        for text in texts:
            self.sha.update(text.encode(errors="surrogatepass") + b"\0")


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yields the code and that of the functions inside it."""
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _codes_in(one)


def _names_in(code: CodeType) -> list[str]:
    """Returns the names that code and the functions inside it use, of attributes too, sorted."""
    return sorted({name for one in _codes_in(code) for name in one.co_names})


_OF_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")


def _named_by(code: CodeType, instructions: Sequence[str]) -> list[str]:
    """Returns the names in these instructions of code and of the functions inside it, sorted. An import from the
    package that the function lies in has the name ""."""
    found = (one for part in _codes_in(code) for one in dis.get_instructions(part))
    return sorted({str(one.argval) for one in found if one.opname in instructions})


def _slots_of(kind: type) -> list[str]:
    """Returns the names of the slots of a class and of its bases, as attributes."""
    found = []
    for base in kind.__mro__:
        slots: str | Mapping[str, object] | Sequence[str] = vars(base).get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                is_private = name.startswith("__") and not name.endswith("__")
                found.append(f"_{base.__name__.lstrip('_')}{name}" if is_private else name)
    return found


def _is_installed(module: "str | None") -> bool:
    """Returns whether a module is of the standard library, of cacheprobe or of an installed package."""
    top = (module or "").split(".")[0]
    if top in ("cacheprobe", "builtins"):
        return True
    if not top or top == "__main__":
        return False
    if top in sys.modules:
        held = vars(sys.modules[top])
        places = [held.get("__file__"), *(held.get("__path__") or ())]
    else:
        found = find_spec(top)
        places = [found.origin, *(found.submodule_search_locations or ())] if found else []
    files = [one for one in places if isinstance(one, str) and os.path.isabs(one)]
    if not files:
        return top in sys.stdlib_module_names
    return any("-packages" in one or one.startswith(_STDLIB) for one in files)


_STDLIB = os.path.dirname(os.__file__)
