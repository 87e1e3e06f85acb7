"""Exports the drafters as `cp.drafters.NAME`. base.py says what a drafter is, and how to add one."""

from cacheprobe.engine.drafters.base import Drafter
from cacheprobe.engine.drafters.dflash import DFlash
from cacheprobe.engine.drafters.eagle3 import Eagle3
from cacheprobe.engine.drafters.early_exit import EarlyExit, FastPath
from cacheprobe.engine.drafters.medusa import Medusa
from cacheprobe.engine.drafters.model import DraftModel
from cacheprobe.engine.drafters.mtp import MTP
from cacheprobe.engine.drafters.ngram import NGram
from cacheprobe.engine.drafters.replayed import Replayed
from cacheprobe.engine.drafters.scripted import Scripted

__all__ = [
    "MTP",
    "DFlash",
    "DraftModel",
    "Drafter",
    "Eagle3",
    "EarlyExit",
    "FastPath",
    "Medusa",
    "NGram",
    "Replayed",
    "Scripted",
]


def __dir__() -> list[str]:
    """Returns the public names, for dir() and completion."""
    return sorted(__all__)
