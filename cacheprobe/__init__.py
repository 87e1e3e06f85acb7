"""Records a language model's tokens, states and lens readings while it generates, those of rejected drafts included.

The names in `__all__` are imported at their first use, to keep the import quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cacheprobe import analysis, lenses, tasks
    from cacheprobe import views as plots
    from cacheprobe.api import (
        estimate,
        kv_snapshot,
        load_model,
        load_trace,
        reference,
        resume,
        run,
        stream,
        verify,
    )
    from cacheprobe.core.config import CaptureConfig
    from cacheprobe.core.records import Request, SamplingParams
    from cacheprobe.edits import interventions, patching
    from cacheprobe.edits.gradients.compute import gradients
    from cacheprobe.engine import drafters
    from cacheprobe.engine.draft_costs import draft_costs
    from cacheprobe.kvcache.surgery import diff_rows
    from cacheprobe.lenses import probes
    from cacheprobe.models.prompts import Chat
    from cacheprobe.sweeps.engine import sweep
    from cacheprobe.sweeps.results import load_sweep
    from cacheprobe.trace.importers.entry import import_generate, import_vllm
    from cacheprobe.trace.recording.interrupts import Interrupted
    from cacheprobe.trace.replays.run import replay
    from cacheprobe.trace.trace import Trace

__version__ = "0.1.0"

_HOMES = {
    "load_model": "cacheprobe.api",
    "load_trace": "cacheprobe.api",
    "run": "cacheprobe.api",
    "estimate": "cacheprobe.api",
    "draft_costs": "cacheprobe.engine.draft_costs",
    "resume": "cacheprobe.api",
    "stream": "cacheprobe.api",
    "reference": "cacheprobe.api",
    "verify": "cacheprobe.api",
    "kv_snapshot": "cacheprobe.api",
    "import_generate": "cacheprobe.trace.importers.entry",
    "import_vllm": "cacheprobe.trace.importers.entry",
    "replay": "cacheprobe.trace.replays.run",
    "gradients": "cacheprobe.edits.gradients.compute",
    "diff_rows": "cacheprobe.kvcache.surgery",
    "CaptureConfig": "cacheprobe.core.config",
    "Interrupted": "cacheprobe.trace.recording.interrupts",
    "Trace": "cacheprobe.trace.trace",
    "Request": "cacheprobe.core.records",
    "SamplingParams": "cacheprobe.core.records",
    "Chat": "cacheprobe.models.prompts",
    "sweep": "cacheprobe.sweeps.engine",
    "load_sweep": "cacheprobe.sweeps.results",
}
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
    "Request", "Chat", "SamplingParams", "CaptureConfig", "Trace", "Interrupted",
    "analysis", "tasks", "drafters", "interventions", "lenses", "patching", "plots", "probes",
]  # fmt: skip


if not TYPE_CHECKING:  # a checker that saw it would let every misspelt name pass

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            return getattr(import_module(_HOMES[name]), name)
        if name in _MODULES:
            return import_module(_MODULES[name])
        from cacheprobe.core.values import no_attribute

        raise no_attribute("module 'cacheprobe'", name, __all__)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
