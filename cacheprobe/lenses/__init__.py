"""Exports the lenses as `cp.lenses.NAME`. A lens turns a layer's state into logits over the vocabulary; a
Dictionary turns it into features."""

from cacheprobe.lenses.base import Lens, LensError
from cacheprobe.lenses.dictionaries import Dictionary, DictionaryConfig, DictionaryError
from cacheprobe.lenses.jacobian import JacobianLens
from cacheprobe.lenses.logit import LogitLens
from cacheprobe.lenses.patchscope import Patchscope
from cacheprobe.lenses.thought import ThoughtLens
from cacheprobe.lenses.tuned import TunedLens

__all__ = [  # noqa: RUF022
    "JacobianLens", "Lens", "LensError", "LogitLens", "Patchscope", "ThoughtLens", "TunedLens",
    "Dictionary", "DictionaryConfig", "DictionaryError",
]  # fmt: skip


def __dir__() -> list[str]:
    """Returns the public names, for dir() and completion."""
    return sorted(__all__)
