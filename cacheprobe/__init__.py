"""cacheprobe: what a language model believed before it committed.

The names below are all that a notebook needs; each is loaded when first used, so that the import is quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cacheprobe import drafters, interventions, lenses, patching, probes, tasks, views
    from cacheprobe.api import (
        cache_rows,
        import_generate,
        import_vllm,
        load_model,
        load_trace,
        reference,
        run,
        stream,
        verify,
    )
    from cacheprobe.cache.surgery import diff_rows
    from cacheprobe.config import CaptureConfig
    from cacheprobe.observe.interrupts import Interrupted
    from cacheprobe.observe.trace import Trace
    from cacheprobe.records import Request, SamplingParams
    from cacheprobe.sweeps.engine import sweep
    from cacheprobe.sweeps.results import load_sweep

__version__ = "0.1.0"

_HOMES = {
    "load_model": "cacheprobe.api",
    "load_trace": "cacheprobe.api",
    "run": "cacheprobe.api",
    "stream": "cacheprobe.api",
    "reference": "cacheprobe.api",
    "verify": "cacheprobe.api",
    "cache_rows": "cacheprobe.api",
    "import_generate": "cacheprobe.api",
    "import_vllm": "cacheprobe.api",
    "diff_rows": "cacheprobe.cache.surgery",
    "CaptureConfig": "cacheprobe.config",
    "Interrupted": "cacheprobe.observe.interrupts",
    "Trace": "cacheprobe.observe.trace",
    "Request": "cacheprobe.records",
    "SamplingParams": "cacheprobe.records",
    "sweep": "cacheprobe.sweeps.engine",
    "load_sweep": "cacheprobe.sweeps.results",
}
_MODULES = ("tasks", "drafters", "interventions", "lenses", "patching", "probes", "views")

__all__ = [  # noqa: RUF022
    "load_model", "run", "stream", "reference", "verify", "load_trace", "cache_rows", "diff_rows",
    "sweep", "load_sweep", "import_generate", "import_vllm",
    "Request", "SamplingParams", "CaptureConfig", "Trace", "Interrupted",
    "tasks", "drafters", "interventions", "lenses", "patching", "probes", "views",
]  # fmt: skip


if not TYPE_CHECKING:  # a checker that saw it would let every misspelt name pass

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            return getattr(import_module(_HOMES[name]), name)
        if name in _MODULES:
            return import_module(f"cacheprobe.{name}")
        raise AttributeError(f"module 'cacheprobe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
