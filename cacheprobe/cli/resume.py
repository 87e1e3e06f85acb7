"""Implements `cacheprobe resume`: continues a run that was recorded to disk and not finished."""

from pathlib import Path


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
    from cacheprobe.analysis.summary import closing
    from cacheprobe.cli.run import say_stopped
    from cacheprobe.core.registry import make
    from cacheprobe.engine.continuation import unfinished_run
    from cacheprobe.models.loaders import model_of_run

    meta = unfinished_run(run).header["meta"]
    settings = meta.get("command", {}).get("settings")
    if settings is None and (meta["drafter"] or meta.get("interventions")):
        raise ValueError(f"{run} was begun in Python, with a drafter or interventions; use cp.resume there")
    drafter = make("drafters", settings["drafter"]) if settings and settings.get("drafter") else None
    about = meta["capture"].get("dictionary") or {}
    features = None if dictionary is None else cp.lenses.Dictionary.load(dictionary, hook=about.get("hook"))
    loaded = model_of_run(meta["fingerprint"], model, adapter, progress=progress)
    try:
        trace = cp.resume(
            run, loaded, drafter=drafter, dictionary=features, memory_budget=memory_budget, progress=progress
        )
    except cp.Interrupted as stopped:
        return say_stopped(stopped)
    print(closing(trace, is_behaviour_printed=progress))
    print(f"run: {run}")
    return 0
