"""Exports Dictionary, which reads features that SAELens, Gemma Scope and others have trained."""

from cacheprobe.lenses.dictionaries.config import DictionaryConfig, DictionaryError
from cacheprobe.lenses.dictionaries.dictionary import Dictionary

__all__ = ["Dictionary", "DictionaryConfig", "DictionaryError"]


def __dir__() -> list[str]:
    """Returns the public names, for dir() and completion."""
    return sorted(__all__)
