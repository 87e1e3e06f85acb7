"""Recognises the modules of transformers that compute a plain RMSNorm."""

from typing import NamedTuple

from torch import Tensor

from cacheprobe.core.live import LiveModule

_PLAIN = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")
"""Classes that multiply by their weight as it is; Gemma's, for example, adds 1 to it."""


class Norm(NamedTuple):
    """Holds the weight and the epsilon of an RMSNorm."""

    weight: Tensor
    eps: float


def rms_norm_of(module: LiveModule) -> Norm | None:
    """Returns the present Norm of a module that computes a plain RMSNorm; None for another module."""
    if type(module).__name__ not in _PLAIN:
        return None
    return Norm(module.weight, float(module.variance_epsilon))
