"""Checks single values that a user gave: whole numbers, numbers, flags and texts. Every error names the argument."""

from operator import index
from typing import Any, TypeAlias, Union

Json: TypeAlias = Union[bool, int, float, str, list["Json"], dict[str, "Json"], None]  # noqa: UP007
"""A value as json.loads returns it."""


def whole_number(name: str, value: Any) -> int:
    """Returns the value as Python's int; integers of numpy and torch are taken. Raises: ValueError naming it."""
    if not is_flag(value):
        try:
            return index(value)
        except (TypeError, ValueError):  # a tensor of several numbers raises either
            pass
    raise ValueError(f"{name} must be a whole number, got {value!r:.60}")


def number(name: str, value: Any) -> float:
    """Returns the value as Python's float. Raises: ValueError for flags, texts and what is no number."""
    if not is_flag(value) and not isinstance(value, str | bytes | bytearray):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            pass
    raise ValueError(f"{name} must be a number, got {value!r:.60}")


def flag(name: str, value: Any) -> bool:
    """Returns the value as Python's bool; numpy's flags are taken. Raises: ValueError for anything else."""
    if not is_flag(value):
        raise ValueError(f"{name} must be True or False, got {value!r:.60}")
    return bool(value)


def is_flag(value: Any) -> bool:
    """Whether a value is True or False, of Python, numpy or torch: not the number 1 or 0."""
    return isinstance(value, bool) or "bool" in str(getattr(value, "dtype", ""))


def require_encodable(name: str, text: str) -> None:
    """Raises: ValueError for half of a surrogate pair, which stands for no character and which no tokenizer reads."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} must be text that UTF-8 can encode, got half of a surrogate pair, {text[error.start]!r}, at "
            f"character {error.start}; remove it, or decode the text with errors='replace'"
        ) from None
