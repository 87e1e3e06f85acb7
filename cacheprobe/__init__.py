"""Records a language model's tokens, states and lens readings while it generates, those of rejected drafts included.

The names in `__all__` are imported at their first use, to keep the import quick.
"""

import sys
from contextlib import nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cacheprobe import analysis, lenses, tasks
    from cacheprobe import views as plots
    from cacheprobe.analysis.replay import Replay
    from cacheprobe.api import estimate, kv_snapshot, load_trace, reference, resume, run, stream, verify
    from cacheprobe.core.config import CaptureConfig, capture_module
    from cacheprobe.core.records import Request, SamplingParams
    from cacheprobe.core.registry import register
    from cacheprobe.edits import interventions, patching
    from cacheprobe.edits.gradient_texts import GradientText
    from cacheprobe.edits.gradients import Gradients, gradients
    from cacheprobe.engine import drafters
    from cacheprobe.engine.draft_costs import draft_costs
    from cacheprobe.kvcache.surgery import KVSnapshot, diff_rows
    from cacheprobe.lenses import probes
    from cacheprobe.models.base import CachedLM
    from cacheprobe.models.loaders import load_model
    from cacheprobe.models.prompts import Chat
    from cacheprobe.sweeps.engine import SweepReport, sweep
    from cacheprobe.sweeps.results import Sweep, load_sweep
    from cacheprobe.trace.importers.entry import import_generate, import_vllm
    from cacheprobe.trace.recording.observers import Interrupted
    from cacheprobe.trace.recording.stream import Piece, Stream
    from cacheprobe.trace.replays.run import replay
    from cacheprobe.trace.trace import Trace

__version__ = "0.1.0"

_NAMES = {
    "cacheprobe.analysis.replay": "Replay",
    "cacheprobe.api": "estimate kv_snapshot load_trace reference resume run stream verify",
    "cacheprobe.core.config": "CaptureConfig capture_module",
    "cacheprobe.core.records": "Request SamplingParams",
    "cacheprobe.core.registry": "register",
    "cacheprobe.edits.gradients": "Gradients gradients",
    "cacheprobe.edits.gradient_texts": "GradientText",
    "cacheprobe.engine.draft_costs": "draft_costs",
    "cacheprobe.kvcache.surgery": "KVSnapshot diff_rows",
    "cacheprobe.models.base": "CachedLM",
    "cacheprobe.models.loaders": "load_model",
    "cacheprobe.models.prompts": "Chat",
    "cacheprobe.sweeps.engine": "SweepReport sweep",
    "cacheprobe.sweeps.results": "Sweep load_sweep",
    "cacheprobe.trace.importers.entry": "import_generate import_vllm",
    "cacheprobe.trace.recording.observers": "Interrupted",
    "cacheprobe.trace.recording.stream": "Piece Stream",
    "cacheprobe.trace.replays.run": "replay",
    "cacheprobe.trace.trace": "Trace",
}
"""The public names by the module that defines them."""
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
_MODULES = {
    "analysis": "cacheprobe.analysis",
    "tasks": "cacheprobe.tasks",
    "drafters": "cacheprobe.engine.drafters",
    "interventions": "cacheprobe.edits.interventions",
    "lenses": "cacheprobe.lenses",
    "patching": "cacheprobe.edits.patching",
    "plots": "cacheprobe.views",
    "probes": "cacheprobe.lenses.probes",
}

__all__ = [  # noqa: RUF022
    "load_model", "run", "resume", "estimate", "draft_costs", "stream", "reference", "verify", "load_trace",
    "kv_snapshot", "diff_rows", "sweep", "load_sweep", "import_generate", "import_vllm", "replay", "gradients",
    "Request", "Chat", "SamplingParams", "CaptureConfig", "capture_module", "Trace", "Interrupted", "Stream", "Piece",
    "KVSnapshot", "Replay", "Gradients", "GradientText", "Sweep", "SweepReport", "CachedLM", "register",
    "analysis", "tasks", "drafters", "interventions", "lenses", "patching", "plots", "probes",
]  # fmt: skip


if not TYPE_CHECKING:  # a checker that saw it would let every misspelt name pass

    def __getattr__(name: str) -> Any:
        from cacheprobe.core.live import without_collection
        from cacheprobe.core.values import no_attribute

        if (home := _HOMES.get(name) or _MODULES.get(name)) is None:
            raise no_attribute("module 'cacheprobe'", name, __all__)
        with nullcontext() if home in sys.modules else without_collection():
            module = import_module(home)
        return module if name in _MODULES else getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
