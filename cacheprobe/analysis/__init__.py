"""Computes measures, attributions, comparisons and lens readings from a trace. Each function is imported at its first
use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cacheprobe.analysis.distributions import divergences, rejected_tokens
    from cacheprobe.analysis.flips import flip
    from cacheprobe.analysis.forks import fork, kv_snapshot
    from cacheprobe.analysis.logit_attribution import attribution
    from cacheprobe.analysis.of_trace import (
        agreement,
        commitment,
        draft_agreement,
        generated_tokens,
        lens_readings,
        prediction_depth,
        saturation,
        to_activation_cache,
        tokens_at,
    )
    from cacheprobe.analysis.reading import read_states
    from cacheprobe.analysis.thought_readings import read_thoughts, thought_activations

_HOMES = {
    "agreement": "of_trace",
    "attribution": "logit_attribution",
    "kv_snapshot": "forks",
    "commitment": "of_trace",
    "divergences": "distributions",
    "draft_agreement": "of_trace",
    "flip": "flips",
    "fork": "forks",
    "lens_readings": "of_trace",
    "prediction_depth": "of_trace",
    "read_states": "reading",
    "read_thoughts": "thought_readings",
    "rejected_tokens": "distributions",
    "saturation": "of_trace",
    "thought_activations": "thought_readings",
    "to_activation_cache": "of_trace",
    "generated_tokens": "of_trace",
    "tokens_at": "of_trace",
}

__all__ = [
    "agreement",
    "attribution",
    "commitment",
    "divergences",
    "draft_agreement",
    "flip",
    "fork",
    "generated_tokens",
    "kv_snapshot",
    "lens_readings",
    "prediction_depth",
    "read_states",
    "read_thoughts",
    "rejected_tokens",
    "saturation",
    "thought_activations",
    "to_activation_cache",
    "tokens_at",
]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name in _HOMES:
            return getattr(import_module(f"cacheprobe.analysis.{_HOMES[name]}"), name)
        from cacheprobe.core.values import no_attribute

        raise no_attribute("module 'cacheprobe.analysis'", name, __all__)


def __dir__() -> list[str]:
    """Returns the public names, for dir() and completion."""
    return list(__all__)
