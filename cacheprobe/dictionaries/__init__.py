"""Exports Dictionary, which reads features that SAELens, Gemma Scope and others have trained."""

from cacheprobe.dictionaries.config import DictionaryConfig, DictionaryError
from cacheprobe.dictionaries.dictionary import Dictionary

__all__ = ["Dictionary", "DictionaryConfig", "DictionaryError"]
