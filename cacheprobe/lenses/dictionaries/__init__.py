"""Exports Dictionary, which reads features that SAELens, Gemma Scope and others have trained."""

from cacheprobe.lenses.dictionaries.config import DictionaryConfig, DictionaryError
from cacheprobe.lenses.dictionaries.dictionary import Dictionary

__all__ = ["Dictionary", "DictionaryConfig", "DictionaryError"]
