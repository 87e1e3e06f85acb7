"""Checks values and names that a user gave. An error about a value names the argument; one about an unknown name gives
the nearest one.
"""

import hashlib
import inspect
import os
import re
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from functools import partial
from operator import index
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any, ClassVar, SupportsFloat, SupportsIndex, TypeAlias, Union, cast

from cacheprobe.core.other_names import keyword_advice

Json: TypeAlias = Union[bool, int, float, str, list["Json"], dict[str, "Json"], None]  # noqa: UP007
"""A value as json.loads returns it."""
JsonDict: TypeAlias = dict[str, Any]
"""A JSON object, as json.loads returns it. The file's format fixes the types of its values, or the caller checks."""
TableLine: TypeAlias = Any
"""One line of a pandas table (of itertuples() or iloc): each column is an attribute. pandas gives it no useful type."""
NO_FLAG = {"flag": False}
"""Metadata of a dataclass's setting for which the command line has no flag. `as_flag` makes that of one whose flag has
another name or type than the setting."""


def as_flag(kind: object, name: str | None = None) -> dict[str, object]:
    """Returns metadata of a dataclass's setting whose command-line flag has this type and this name (None: the
    setting's)."""
    return {"flag": True, "kind": kind, "name": name}


def whole_number(name: str, value: object, at_least: int | None = None) -> int:
    """Returns `value` as a Python int; takes integers of numpy and torch too. Raises: ValueError that names `name` for
    anything else, and for a number below `at_least`."""
    bound = "" if at_least is None else f" of at least {at_least}"
    if not is_flag(value):
        try:
            found = index(cast(SupportsIndex, value))
            if at_least is None or found >= at_least:
                return found
        except (TypeError, ValueError):  # a tensor of several numbers raises either
            pass
    raise ValueError(f"{name} must be a whole number{bound}, got {value!r:.60}")


def require_one_of(name: str, value: object, known: Iterable[str], advice: Callable[[str], str] | None = None) -> None:
    """Checks that `value` is one of `known`. Raises: ValueError that says which there are otherwise. advice: from
    the value, the end of the message."""
    if not isinstance(value, str) or value not in (known := tuple(known)):
        more = advice(value) if advice is not None and isinstance(value, str) else ""
        raise ValueError(f"unknown {name} {value!r:.60}; choose one of {', '.join(known)}{more}")


def listed(value: Any) -> list[Any]:
    """Returns the entries of an iterable as a list; [value] for one number or text, and for an array without axes."""
    is_several = isinstance(value, Iterable) and not isinstance(value, str | bytes) and getattr(value, "ndim", 1)
    return list(value) if is_several else [value]


_UNITS = {"": 1, "B": 1} | {
    f"{letter}{i}B": (1024 if i else 1000) ** n for n, letter in enumerate("kMGT", 1) for i in ("", "i")
}
"""Bytes of each unit of a size; kiB is 1,024 bytes."""


def num_bytes(name: str, value: object) -> int:
    """Returns a size in bytes, from a whole number or a text such as "2GB" or "512 MiB". Raises: ValueError that names
    `name` for anything else, and for less than one byte."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(\w*)\s*", value) if isinstance(value, str) else None
    if match is not None and match[2] in _UNITS:
        size = int(float(match[1]) * _UNITS[match[2]])
    elif isinstance(value, str):
        raise ValueError(f"{name} must be a size such as '2GB' or '512MiB', got {value!r:.60}")
    else:
        size = whole_number(name, value)
    if size < 1:
        raise ValueError(f"{name} must be at least one byte, got {value!r:.60}")
    return size


def number(name: str, value: object) -> float:
    """Returns `value` as a Python float. Raises: ValueError that names `name` for a flag, a text or anything else that
    is no number."""
    if not is_flag(value) and not isinstance(value, str | bytes | bytearray):
        try:
            return float(cast(SupportsFloat, value))
        except (TypeError, ValueError, OverflowError):
            pass
    raise ValueError(f"{name} must be a number, got {value!r:.60}")


def flag(name: str, value: object) -> bool:
    """Returns `value` as a Python bool; takes a single flag of numpy or torch too. Raises: ValueError that names `name`
    for a value that is no flag, also for 0 and 1."""
    if not is_flag(value):
        raise ValueError(f"{name} must be True or False, got {value!r:.60}")
    return bool(value)


def is_flag(value: object) -> bool:
    """Returns whether a value is True or False, or anything of numpy or torch with dtype bool, arrays included. The
    numbers 1 and 0 are not flags."""
    return isinstance(value, bool) or "bool" in str(getattr(value, "dtype", ""))


def require_encodable(name: str, text: str) -> None:
    """Checks that UTF-8 can encode `text`. Raises: ValueError that names `name` if it holds half of a surrogate
    pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} must be text that UTF-8 can encode, got half of a surrogate pair, {text[error.start]!r}, at "
            f"character {error.start}; remove it, or decode the text with errors='replace'"
        ) from None


def folder(name: str, value: object) -> Path:
    """Returns the path of a folder or file. Raises: ValueError that names `name` for a value that is neither a text nor
    a Path, for an empty text, and for characters that no file name can hold."""
    try:
        if value != "" and not isinstance(value, bytes) and b"\0" not in os.fsencode(cast(str, value)):
            return Path(cast(str, value))
    except (TypeError, UnicodeEncodeError):
        pass
    raise ValueError(f"{name} must be the path of a folder, as a text or a pathlib.Path, got {value!r:.60}")


def require_settings(settings: Any, above_zero: Iterable[str]) -> None:
    """Checks the int and float fields of a settings dataclass: each must be a number from 0 to below 2**31. An int
    field must hold a whole number; a field named in `above_zero` must not be 0.

    Raises: ValueError that names the setting.
    """
    for one in fields(settings):
        value = getattr(settings, one.name)
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        is_number = is_whole or (one.type is float and isinstance(value, float))
        if one.type in (int, float) and not (is_number and 0 <= value < 2**31):
            kind = "whole number" if one.type is int else "number"
            raise ValueError(f"{one.name} must be a {kind} of at least 0, got {value!r}")
    for name in above_zero:
        if not getattr(settings, name):
            raise ValueError(f"{name} must be more than 0")


def nearest_or_all(name: str, known: Sequence[str]) -> str:
    """Returns part of an error message for an unknown name: "did you mean NEAR?", or "there are A, B, ..." if no known
    name is near."""
    near = get_close_matches(name, known, 1, 0.5)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"


def text_digest(token_ids: Sequence[int]) -> str:
    """Returns the first 16 hex digits of the SHA-256 of a text, given as token ids."""
    return hashlib.sha256(array("q", token_ids).tobytes()).hexdigest()[:16]


# -- names


def hint(name: object, known: Iterable[str]) -> str:
    """Returns the end of an error message for an unknown name: "; did you mean NEAR?", or "" if no known name is
    near."""
    near = get_close_matches(name, tuple(known), 1) if isinstance(name, str) else ()
    return f"; did you mean {near[0]}?" if near else ""


def require_known_options(given: Mapping[str, object], known: Iterable[str]) -> None:
    """Checks that every option of `given` is in `known`. Raises: TypeError for another option; its message gives ours
    for a name of another library, else the nearest one, if there is one."""
    known = tuple(known)
    for name in given:
        if name not in known:
            raise TypeError(f"unknown argument {name!r}{keyword_advice(name, known) or hint(name, known)}")


def no_attribute(owner: str, name: str, known: Iterable[str]) -> AttributeError:
    """Returns an AttributeError for a name that `owner` does not have; its message gives the nearest one, if
    there is one."""
    return AttributeError(f"{owner} has no attribute {name!r}{hint(name, known)}")


class KnownKeywords:
    """Checks the keywords of frozen settings: an unknown keyword of a subclass raises a TypeError, which gives the
    nearest one, if there is one."""

    __slots__ = ()
    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Any]]

    def __new__(cls, *args: object, **settings: object):  # returns Self, which beartype does not take in a method
        """Creates the object. Raises: TypeError for an unknown keyword argument."""
        require_known_options(settings, cls.__dataclass_fields__)
        return object.__new__(cls)


def repr_of_settings(plugin: object) -> str:
    """Returns text such as "RepeatLast(length=3)": the class, and the attributes that the object was given, without
    those that begin with an underscore."""
    given = ", ".join(f"{name}={value!r}" for name, value in vars(plugin).items() if not name.startswith("_"))
    return f"{type(plugin).__name__}({given})"


def name_of(f: Callable[..., object]) -> str:
    """Returns the name of a function; of another object that can be called, the name of its class."""
    return str(f.__name__) if hasattr(f, "__name__") else type(f).__name__


def source_sha256(f: Callable[..., object]) -> str:
    """Returns the SHA-256 of a function's source; of its compiled code if it has no source that can be read."""
    if isinstance(f, partial):
        return hashlib.sha256(repr((source_sha256(f.func), f.args, sorted(f.keywords.items()))).encode()).hexdigest()
    try:
        text = inspect.getsource(f if hasattr(f, "__code__") else type(f))
        if name_of(f) == "<lambda>":  # the source is the whole line, which may hold others
            text += _code_text(f.__code__)  # type: ignore[attr-defined]
    except (OSError, TypeError):
        called = f if hasattr(f, "__code__") else type(f).__call__
        code = called.__code__ if hasattr(called, "__code__") else None
        text = _code_text(code) if isinstance(code, CodeType) else repr(f)  # a function of a library in C has none
    return hashlib.sha256(text.encode()).hexdigest()


def _code_text(code: CodeType) -> str:
    """Returns what a compiled function does, as text without addresses: its instructions, constants and names."""
    constants = [_code_text(one) if isinstance(one, CodeType) else repr(one) for one in code.co_consts]
    return repr((code.co_code, constants, code.co_names))
