"""One thing that was looked for."""

from typing import NamedTuple


class Finding(NamedTuple):
    """What was looked for, and what was found; with a remedy where it is missing."""

    name: str
    said: str
    is_there: bool = True
    remedy: str = ""
    """One line: how to get it, or what works without it."""
    demo_needs_it: bool = False
