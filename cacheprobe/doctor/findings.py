"""Defines the result of one check."""

from typing import NamedTuple


class Finding(NamedTuple):
    """The checked item, the result in words, and a remedy if the item is missing."""

    name: str
    said: str
    is_there: bool = True
    remedy: str = ""
    """One line: how to get it, or what works without it."""
    demo_needs_it: bool = False
