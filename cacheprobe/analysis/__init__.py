"""Computes measures, attributions, comparisons, verify windows and lens readings from a trace. Each function is
imported at its first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from cacheprobe.core.values import no_attribute

if TYPE_CHECKING:
    from cacheprobe.analysis.dictionary_loss import reconstruction as reconstruction
    from cacheprobe.analysis.draft_acceptance import acceptance as acceptance
    from cacheprobe.analysis.draft_acceptance import expected_speedup as expected_speedup
    from cacheprobe.analysis.exports import to_dataframe as to_dataframe
    from cacheprobe.analysis.exports import to_datasets as to_datasets
    from cacheprobe.analysis.exports import to_neuronpedia as to_neuronpedia
    from cacheprobe.analysis.exports import to_numpy as to_numpy
    from cacheprobe.analysis.exports import to_speculators as to_speculators
    from cacheprobe.analysis.exports import to_xarray as to_xarray
    from cacheprobe.analysis.flips import flip as flip
    from cacheprobe.analysis.forks import fork as fork
    from cacheprobe.analysis.forks import kv_snapshot as kv_snapshot
    from cacheprobe.analysis.logits import answer_logprobs as answer_logprobs
    from cacheprobe.analysis.logits import attribution as attribution
    from cacheprobe.analysis.measures import agreement as agreement
    from cacheprobe.analysis.measures import commitment as commitment
    from cacheprobe.analysis.measures import draft_agreement as draft_agreement
    from cacheprobe.analysis.measures import generated_tokens as generated_tokens
    from cacheprobe.analysis.measures import lens_readings as lens_readings
    from cacheprobe.analysis.measures import prediction_depth as prediction_depth
    from cacheprobe.analysis.measures import saturation as saturation
    from cacheprobe.analysis.measures import to_activation_cache as to_activation_cache
    from cacheprobe.analysis.measures import tokens_at as tokens_at
    from cacheprobe.analysis.reading import divergences as divergences
    from cacheprobe.analysis.reading import read_states as read_states
    from cacheprobe.analysis.reading import rejected_tokens as rejected_tokens
    from cacheprobe.analysis.thought_readings import read_thoughts as read_thoughts
    from cacheprobe.analysis.thought_readings import thought_activations as thought_activations
    from cacheprobe.analysis.windows import Window as Window
    from cacheprobe.analysis.windows import accepted_whole as accepted_whole
    from cacheprobe.analysis.windows import find_windows as find_windows
    from cacheprobe.analysis.windows import rolled_back as rolled_back
    from cacheprobe.edits.gradient_texts import logit_difference as logit_difference
    from cacheprobe.edits.gradient_texts import text_logprob as text_logprob
    from cacheprobe.edits.gradient_texts import token_logprob as token_logprob
    from cacheprobe.edits.patchscopes import patchscope as patchscope
    from cacheprobe.trace.tables.engine_differences import engine_differences as engine_differences
    from cacheprobe.trace.tables.reasoning import reasoning_spans as reasoning_spans
    from cacheprobe.trace.tables.reasoning import with_reasoning as with_reasoning
    from cacheprobe.trace.tables.routing import routing as routing
    from cacheprobe.trace.tables.token_table import group_rejections as group_rejections
    from cacheprobe.trace.tables.token_table import token_table as token_table
    from cacheprobe.trace.tables.token_table import tokens_with_text as tokens_with_text

_HOMES = {
    "cacheprobe.analysis.draft_acceptance": "acceptance expected_speedup",
    "cacheprobe.analysis.exports": "to_dataframe to_datasets to_neuronpedia to_numpy to_speculators to_xarray",
    "cacheprobe.analysis.flips": "flip",
    "cacheprobe.analysis.forks": "fork kv_snapshot",
    "cacheprobe.analysis.logits": "answer_logprobs attribution",
    "cacheprobe.analysis.measures": (
        "agreement commitment draft_agreement generated_tokens "
        "lens_readings prediction_depth saturation to_activation_cache tokens_at"
    ),
    "cacheprobe.analysis.reading": "divergences read_states rejected_tokens",
    "cacheprobe.analysis.dictionary_loss": "reconstruction",
    "cacheprobe.analysis.thought_readings": "read_thoughts thought_activations",
    "cacheprobe.analysis.windows": "Window accepted_whole find_windows rolled_back",
    "cacheprobe.edits.gradient_texts": "logit_difference text_logprob token_logprob",
    "cacheprobe.edits.patchscopes": "patchscope",
    "cacheprobe.trace.tables.engine_differences": "engine_differences",
    "cacheprobe.trace.tables.reasoning": "reasoning_spans with_reasoning",
    "cacheprobe.trace.tables.routing": "routing",
    "cacheprobe.trace.tables.token_table": "group_rejections token_table tokens_with_text",
}
"""Module -> names of its public functions."""
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

if not TYPE_CHECKING:
    __all__ = sorted(_HOME_OF)

    def __getattr__(name: str) -> object:
        if name in _HOME_OF:
            return getattr(import_module(_HOME_OF[name]), name)
        raise no_attribute("module 'cacheprobe.analysis'", name, __all__)


def __dir__() -> list[str]:
    """Returns the public names, for dir() and completion."""
    return sorted(_HOME_OF)
