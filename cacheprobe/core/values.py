"""Checks single values that a user gave: whole numbers, numbers, flags and texts. Every error message names the
argument."""

from collections.abc import Iterable, Sequence
from dataclasses import fields
from difflib import get_close_matches
from operator import index
from typing import Any, SupportsFloat, SupportsIndex, TypeAlias, Union, cast

Json: TypeAlias = Union[bool, int, float, str, list["Json"], dict[str, "Json"], None]  # noqa: UP007
"""A value as json.loads returns it."""
JsonDict: TypeAlias = dict[str, Any]
"""A JSON object, as json.loads returns it. The file's format fixes the types of its values, or the caller checks."""
TableLine: TypeAlias = Any
"""One line of a pandas table (of itertuples() or iloc): each column is an attribute. pandas gives it no useful type."""
NO_FLAG = {"flag": False}
"""Metadata of a dataclass's setting for which the command line has no flag."""


def whole_number(name: str, value: object) -> int:
    """Returns `value` as a Python int; takes integers of numpy and torch too. Raises: ValueError that names `name` for
    anything else."""
    if not is_flag(value):
        try:
            return index(cast(SupportsIndex, value))
        except (TypeError, ValueError):  # a tensor of several numbers raises either
            pass
    raise ValueError(f"{name} must be a whole number, got {value!r:.60}")


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
    """Returns `value` as a Python bool; takes flags of numpy and torch too. Raises: ValueError that names `name` for
    anything else."""
    if not is_flag(value):
        raise ValueError(f"{name} must be True or False, got {value!r:.60}")
    return bool(value)


def is_flag(value: object) -> bool:
    """Returns whether a value is True or False, of Python, numpy or torch. The numbers 1 and 0 are not flags."""
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


def require_settings(settings: Any, above_zero: Iterable[str]) -> None:
    """Checks the int and float fields of a settings dataclass: none may be negative, and those named in `above_zero`
    may not be 0.

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
    """Returns the part of an error message that helps with an unknown name: "did you mean NEAR?", or, if no known name
    is near, "there are A, B, ..."."""
    near = get_close_matches(name, known, 1, 0.5)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
