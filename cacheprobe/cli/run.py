"""Implements `cacheprobe run`: generates and saves the trace. Heavy imports are made when the command runs."""

import sys
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from cacheprobe.cli.flags import with_flags
from cacheprobe.core.run_flags import ModelFlags, PromptFlags, RunFlags
from cacheprobe.core.values import JsonDict

if TYPE_CHECKING:
    from cacheprobe.engine.drafters.base import Drafter
    from cacheprobe.trace.recording.observers import Interrupted
    from cacheprobe.trace.recording.to_disk import OutputOptions

SHAPES = ("window", "group", "capacity", "max_batch", "max_kv_tokens", "determinism")
PASSED_ON = ("deterministic", "lens", "max_new_tokens", "seed", *SHAPES)
"""Settings that are passed to `cp.run` unchanged."""


@with_flags
def run(
    *,
    out: Path | None = None,
    dry_run: bool = False,
    overwrite: bool = False,
    memory_budget: str | None = None,
    config: Path | None = None,
    model: ModelFlags,
    prompts: PromptFlags,
    settings: RunFlags,
    progress: bool = True,
) -> int:
    """Generate from prompts or a task's examples, and save the trace; with --dry-run, estimate what that takes.

    The trace is written while the run goes on; `cacheprobe resume DIR` continues a run that was killed. Ctrl-C saves
    what is finished, as DIR-stopped if DIR holds a run, and exits with 130; pressed again, it ends at once.

    Parameters
    ----------
    out
        Directory for the trace; needed unless --dry-run is given.
    dry_run
        Print an estimate of passes, memory, disk space and time instead, and run nothing.
    overwrite
        Replace the run that --out holds, and remove its report.html. The old run stays until the new one is complete.
    memory_budget
        Most memory for what is not written yet, such as 2GB; by default a quarter of what is free.
    config
        A YAML file of settings, named as these flags are; flags override them.
    progress
        Show progress bars.
    """
    from cacheprobe.models.known import require_known

    require_known(model.model)  # before torch is imported, which takes seconds
    import cacheprobe as cp
    from cacheprobe.analysis.summary import closing
    from cacheprobe.core.records import SamplingParams
    from cacheprobe.trace.manifest import JOURNAL
    from cacheprobe.trace.places import require_free

    prompts.require_one_source()
    if out is not None:
        require_free(out, overwrite)
    elif not dry_run:
        raise ValueError("give --out, the directory for the trace, or --dry-run for an estimate")
    # before examples are made and the model is loaded, which takes seconds: settings check themselves
    sampling = SamplingParams(
        temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p, stop=settings.stop
    )
    capture = cp.CaptureConfig(
        settings.capture,
        heads=settings.heads,
        statuses=settings.statuses or None,
        every=settings.every,
        dtype=settings.capture_dtype,
    )
    drafter, to_read = _drafter_and_prompts(model, prompts, settings)
    loaded = cp.load_model(**asdict(model), progress=progress)
    passed_on = {name: getattr(settings, name) for name in PASSED_ON}
    arguments: dict[str, Any] = dict(
        drafter=drafter, capture=capture, layers=list(settings.layers) or "all", sampling=sampling, **passed_on
    )
    if dry_run or out is None:
        estimate = cp.estimate(loaded, to_read, **arguments)
        print(estimate)
        estimate.require_disk(out or Path())
        return 0
    command = {
        "name": "run",
        "config": config.name if config else None,
        "settings": _given(model) | _given(prompts) | _given(settings),
    }
    to: OutputOptions = {"command": command, "out": out, "overwrite": overwrite, "memory_budget": memory_budget}
    try:
        trace = cp.run(loaded, to_read, progress=progress, **arguments, **to)
    except cp.Interrupted as stopped:
        return say_stopped(stopped)
    except KeyboardInterrupt:
        if (out / JOURNAL).exists():
            print(
                f"stopped at once; to continue what is on the disk: cacheprobe resume {quote(str(out))}",
                file=sys.stderr,
            )
        raise
    print(closing(trace, is_behaviour_printed=progress))
    print(f"run: {out}")
    return 0


def _drafter_and_prompts(
    model: ModelFlags, prompts: PromptFlags, settings: RunFlags
) -> "tuple[Drafter | None, list[object]]":
    """Returns (the drafter or None, a list of prompts or task examples), checked before the model is loaded. Raises:
    ValueError for settings that a run would refuse."""
    from cacheprobe.core.config import resolve_layers
    from cacheprobe.core.records import SamplingParams
    from cacheprobe.core.registry import make
    from cacheprobe.core.values import require_encodable
    from cacheprobe.engine.drafters.early_exit import EarlyExit
    from cacheprobe.engine.shapes import choose_shapes
    from cacheprobe.models.known import num_layers

    SamplingParams(seed=settings.seed, max_new_tokens=settings.max_new_tokens, n=prompts.n)
    choose_shapes(None, settings.drafter is not None, {name: getattr(settings, name) for name in SHAPES})
    for text in prompts.prompt:
        require_encodable("--prompt", text)
    to_read: list[object] = list(prompts.prompt)
    if prompts.task is not None:
        to_read = make("tasks", prompts.task, **prompts.task_settings).examples(prompts.n, settings.seed)
    drafter = make("drafters", settings.drafter) if settings.drafter else None
    if (depth := num_layers(model.model)) is not None:
        resolve_layers(settings.layers or "all", depth)
        if isinstance(drafter, EarlyExit):
            drafter.check_layers(depth, model.model)
    return drafter, to_read


def say_stopped(stopped: "Interrupted") -> int:
    """Prints how far a run came that Ctrl-C stopped, and the directory that it is in; returns 130."""
    finished = len(stopped.trace.requests) - stopped.num_cancelled
    print(
        f"stopped by Ctrl-C: {finished} of {len(stopped.trace.requests)} requests finished; the others end where they "
        "stood, as cancelled",
        file=sys.stderr,
    )
    print(f"run: {stopped.directory}")
    return 130


def _given(settings: ModelFlags | PromptFlags | RunFlags) -> JsonDict:
    """Returns the settings that have a value, from flags, file and defaults, as a dict to store with the run."""
    return {name: value for name, value in asdict(settings).items() if value not in (None, ())}
