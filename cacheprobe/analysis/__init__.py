"""Computes measures, attributions, comparisons and lens readings from a trace. Each function is imported at its first
use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cacheprobe.analysis.answers import answer_logprobs
    from cacheprobe.analysis.dictionaries.reconstruction import reconstruction
    from cacheprobe.analysis.distributions import divergences, rejected_tokens
    from cacheprobe.analysis.draft_replay.laboratory import acceptance
    from cacheprobe.analysis.draft_replay.speedup import expected_speedup
    from cacheprobe.analysis.exports.arrays import to_numpy, to_xarray
    from cacheprobe.analysis.exports.neuronpedia import to_neuronpedia
    from cacheprobe.analysis.exports.speculators import to_speculators
    from cacheprobe.analysis.exports.states_table import to_dataframe, to_datasets
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
    from cacheprobe.edits.gradients.metrics import logit_difference, text_logprob, token_logprob
    from cacheprobe.edits.patchscopes import patchscope
    from cacheprobe.trace.tables.engine_differences import engine_differences
    from cacheprobe.trace.tables.reasoning import reasoning_spans, with_reasoning
    from cacheprobe.trace.tables.routing import routing

_HOMES = {
    "acceptance": "draft_replay.laboratory",
    "agreement": "of_trace",
    "answer_logprobs": "cacheprobe.analysis.answers",
    "attribution": "logit_attribution",
    "kv_snapshot": "forks",
    "commitment": "of_trace",
    "divergences": "distributions",
    "draft_agreement": "of_trace",
    "engine_differences": "cacheprobe.trace.tables.engine_differences",
    "expected_speedup": "draft_replay.speedup",
    "flip": "flips",
    "fork": "forks",
    "lens_readings": "of_trace",
    "logit_difference": "cacheprobe.edits.gradients.metrics",
    "prediction_depth": "of_trace",
    "read_states": "reading",
    "read_thoughts": "thought_readings",
    "reasoning_spans": "cacheprobe.trace.tables.reasoning",
    "with_reasoning": "cacheprobe.trace.tables.reasoning",
    "reconstruction": "dictionaries.reconstruction",
    "patchscope": "cacheprobe.edits.patchscopes",
    "rejected_tokens": "distributions",
    "routing": "cacheprobe.trace.tables.routing",
    "saturation": "of_trace",
    "text_logprob": "cacheprobe.edits.gradients.metrics",
    "thought_activations": "thought_readings",
    "to_activation_cache": "of_trace",
    "to_dataframe": "exports.states_table",
    "to_datasets": "exports.states_table",
    "to_neuronpedia": "exports.neuronpedia",
    "to_numpy": "exports.arrays",
    "to_speculators": "exports.speculators",
    "to_xarray": "exports.arrays",
    "token_logprob": "cacheprobe.edits.gradients.metrics",
    "generated_tokens": "of_trace",
    "tokens_at": "of_trace",
}

__all__ = [
    "acceptance",
    "agreement",
    "answer_logprobs",
    "attribution",
    "commitment",
    "divergences",
    "draft_agreement",
    "engine_differences",
    "expected_speedup",
    "flip",
    "fork",
    "generated_tokens",
    "kv_snapshot",
    "lens_readings",
    "logit_difference",
    "patchscope",
    "prediction_depth",
    "read_states",
    "read_thoughts",
    "reasoning_spans",
    "reconstruction",
    "rejected_tokens",
    "routing",
    "saturation",
    "text_logprob",
    "thought_activations",
    "to_activation_cache",
    "to_dataframe",
    "to_datasets",
    "to_neuronpedia",
    "to_numpy",
    "to_speculators",
    "to_xarray",
    "token_logprob",
    "tokens_at",
    "with_reasoning",
]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name in _HOMES:
            home = _HOMES[name]
            is_elsewhere = home.startswith("cacheprobe.")
            return getattr(import_module(home if is_elsewhere else f"cacheprobe.analysis.{home}"), name)
        from cacheprobe.core.values import no_attribute

        raise no_attribute("module 'cacheprobe.analysis'", name, __all__)


def __dir__() -> list[str]:
    """Returns the public names, for dir() and completion."""
    return list(__all__)
