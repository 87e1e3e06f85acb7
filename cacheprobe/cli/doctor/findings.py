"""Defines the result of one check of `cacheprobe doctor`."""

from typing import NamedTuple


class Finding(NamedTuple):
    """Holds the name of a checked item, the result in words, and a remedy if the item is missing."""

    name: str
    result: str
    is_there: bool = True
    remedy: str = ""
    """One line: how to get the item, or what works without it."""
    demo_needs_it: bool = False
