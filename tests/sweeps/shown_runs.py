"""Runs and results of every kind, for tests of what is taken of a view."""

import shutil
from pathlib import Path

import cacheprobe as cp
from cacheprobe.views.dashboard.run_list import RunList
from tests.dash_page import save_thinking
from tests.dictionaries.planted import random_dictionary
from tests.sweeps.test_sweeps_dash import SETTINGS
from tests.tiny import PROMPTS, SMALL, hf_model, loaded

ROOT = Path(__file__).parents[2]
RESULTS = ("coin-rows", "coin-state-probe", "grid", "prediction-depths", "training-cost")


def save_shown(folder: Path) -> RunList:
    """Runs 0 and 1 are of a model that is saved, and 1 has features; 2 has thoughts; then results of every kind."""
    hf_model().save_pretrained(folder / "model")
    drafter = cp.drafters.EarlyExit(layer=1)
    cp.run(loaded(), PROMPTS, **SMALL, drafter=drafter, capture="STCZ", deterministic=[0, 2]).save(
        folder / "runs" / "one"
    )
    kept = cp.CaptureConfig("STCZ", dictionary=random_dictionary(), top_features=12)
    cp.run(loaded(), PROMPTS, **SMALL, drafter=drafter, capture=kept).save(folder / "runs" / "two")
    save_thinking(folder / "runs" / "x-thinking")
    clean, corrupt = [5, 17, 3, 44, 9], [5, 17, 80, 44, 61]
    (folder / "results").mkdir()
    grid = cp.patching.activation(loaded(), clean, corrupt, answer=(7, 11), progress=False)
    grid.save(folder / "results" / "grid.json")
    for name in RESULTS:
        if name != "grid":
            shutil.copy(ROOT / "analyses" / "results" / f"{name}.json", folder / "results")
    assert cp.sweep(SETTINGS, out=folder / "sweep", progress=False).is_complete
    run_list = RunList.of([folder / "runs", folder / "results", folder / "sweep"], str(folder / "model"))
    assert [path.stem for path in run_list.results] == [*RESULTS, "sweep"]
    return run_list
