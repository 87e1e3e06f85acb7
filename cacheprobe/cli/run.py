"""Implements `cacheprobe run` and `cacheprobe resume`: generates and saves the trace. Heavy imports are made when a
command runs."""

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

from cacheprobe.cli.flags import given_flags, with_flags
from cacheprobe.core.config import CaptureConfig, EngineConfig
from cacheprobe.core.settings import DEFAULT_SAMPLING, ModelFlags, PromptFlags, RunFlags, SamplingParams
from cacheprobe.core.values import JsonDict

if TYPE_CHECKING:
    from cacheprobe.engine.drafters.base import Drafter
    from cacheprobe.trace.trace import Trace


@dataclass(frozen=True, kw_only=True)
class OutFlags:
    """Holds the flags of `cacheprobe run` that say where the trace goes."""

    out: Path | None = None
    """Directory for the trace; needed unless --dry-run is given."""
    dry_run: bool = False
    """Print an estimate of passes, memory, disk space and time instead, and run nothing."""
    overwrite: bool = False
    """Replace the run that --out holds, and remove its report.html. The old run stays until the new one is complete."""
    memory_budget: str | None = None
    """Most memory for what is not written yet, such as 2GB; by default a quarter of what is free."""
    config: Path | None = None
    """A YAML file of settings, named as these flags are; flags override them."""

    def require_usable(self) -> None:
        """Checks that a run can be recorded. Raises: ValueError if there is no directory, or one that is in use."""
        from cacheprobe.trace.places import require_free

        if self.out is not None:
            require_free(self.out, self.overwrite)
        elif not self.dry_run:
            raise ValueError("give --out, the directory for the trace, or --dry-run for an estimate")


@with_flags
def run(
    *,
    output: OutFlags,
    model: ModelFlags,
    prompts: PromptFlags,
    settings: RunFlags,
    shapes: Annotated[JsonDict, EngineConfig],
    sampling: SamplingParams,
    capture: CaptureConfig,
    progress: bool = True,
) -> int:
    """Generate from prompts or a task's examples, and save the trace; with --dry-run, estimate what that takes.

    The trace is written while the run goes on; `cacheprobe resume DIR` continues a run that was killed. Ctrl-C saves
    what is finished, as DIR-stopped if DIR holds a run, and exits with 130; pressed again, it ends at once.

    Parameters
    ----------
    progress
        Show progress bars.
    """
    from cacheprobe.models.known import require_known

    require_known(model.model)  # before torch is imported, which takes seconds
    import cacheprobe as cp

    prompts.require_one_source()
    output.require_usable()
    # before the model is loaded, which takes seconds: settings check themselves
    drafter, to_read = _drafter_and_prompts(model, prompts, settings, shapes, capture)
    arguments: dict[str, Any] = dict(
        drafter=drafter, deterministic=settings.deterministic, lens=settings.lens, seed=settings.seed,
        sampling=sampling, capture=capture, **shapes,
    )  # fmt: skip
    loaded = cp.load_model(**asdict(model), progress=progress)
    if output.dry_run or output.out is None:
        estimate = cp.estimate(loaded, to_read, **arguments)
        print(estimate)
        estimate.require_disk(output.out or Path())
        return 0
    command = {
        "name": "run",
        "config": output.config.name if output.config else None,
        "settings": given_flags(model, prompts, settings, capture, sampling.over(DEFAULT_SAMPLING)) | shapes,
    }
    to = {"command": command, "overwrite": output.overwrite, "memory_budget": output.memory_budget}
    return _recorded(
        output.out,
        lambda out: cp.run(loaded, to_read, progress=progress, out=out, **arguments, **to),
        progress,
    )


def resume(
    run: Path,
    *,
    model: str | None = None,
    adapter: str | None = None,
    dictionary: Path | None = None,
    memory_budget: str | None = None,
    progress: bool = True,
) -> int:
    """Continue a run that `cacheprobe run` began and that was killed, after its last part that is whole.

    Deterministic requests get the tokens and states of a run that was not interrupted, bit for bit.

    Parameters
    ----------
    run
        Directory of the unfinished run.
    model
        Name or directory of the model, if not the one that the run names.
    adapter
        Name or directory of the adapter, if not the one that the run names.
    dictionary
        Folder or file of the dictionary whose features the run records.
    memory_budget
        Most memory for what is not written yet, such as 2GB; by default a quarter of what is free.
    progress
        Show progress bars.
    """
    import cacheprobe as cp
    from cacheprobe.core.registry import make
    from cacheprobe.engine.continuation import unfinished_run
    from cacheprobe.models.loaders import model_of_run

    meta = unfinished_run(run).header["meta"]
    settings = meta.get("command", {}).get("settings")
    if settings is None and (meta["drafter"] or meta.get("interventions")):
        raise ValueError(f"{run} was begun in Python, with a drafter or interventions; use cp.resume there")
    to: dict[str, Any] = {"memory_budget": memory_budget, "progress": progress}
    if settings and settings.get("drafter"):
        to["drafter"] = make("drafters", settings["drafter"])
    if dictionary is not None:
        about = meta["capture"].get("dictionary") or {}
        to["dictionary"] = cp.lenses.Dictionary.load(dictionary, hook=about.get("hook"))
    loaded = model_of_run(meta["fingerprint"], model, adapter, progress=progress)
    return _recorded(run, lambda out: cp.resume(out, loaded, **to), progress)


def _recorded(out: Path, record: "Callable[[Path], Trace]", progress: bool) -> int:
    """Records a run to the directory `out`, prints what it holds, and returns 0; 130 after a Ctrl-C, when it prints how
    far the run came."""
    import cacheprobe as cp
    from cacheprobe.analysis.summary import closing
    from cacheprobe.trace.manifest import JOURNAL

    try:
        trace = record(out)
    except cp.Interrupted as stopped:
        finished = len(stopped.trace.requests) - stopped.num_cancelled
        print(
            f"stopped by Ctrl-C: {finished} of {len(stopped.trace.requests)} requests finished; the others end where "
            "they stood, as cancelled",
            file=sys.stderr,
        )
        print(f"run: {stopped.directory}")
        return 130
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
    model: ModelFlags, prompts: PromptFlags, settings: RunFlags, shapes: JsonDict, capture: CaptureConfig
) -> "tuple[Drafter | None, list[object]]":
    """Returns (the drafter or None, a list of prompts or task examples), checked before the model is loaded. Raises:
    ValueError for settings that a run would refuse."""
    from cacheprobe.core.config import resolve_layers
    from cacheprobe.core.registry import make
    from cacheprobe.core.values import require_encodable
    from cacheprobe.engine.drafters.early_exit import EarlyExit
    from cacheprobe.engine.shapes import choose_shapes
    from cacheprobe.models.known import num_layers

    SamplingParams(seed=settings.seed, n=prompts.n)
    choose_shapes(None, settings.drafter is not None, shapes)
    for text in prompts.prompt:
        require_encodable("--prompt", text)
    to_read: list[object] = list(prompts.prompt)
    if prompts.task is not None:
        to_read = make("tasks", prompts.task, **prompts.task_settings).examples(prompts.n, settings.seed)
    drafter = make("drafters", settings.drafter) if settings.drafter else None
    if (depth := num_layers(model.model)) is not None:
        resolve_layers(capture.layers, depth)
        if isinstance(drafter, EarlyExit):
            drafter.check_layers(depth, model.model)
    return drafter, to_read
