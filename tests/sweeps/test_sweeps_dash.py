"""The dashboard's sweep tab: small multiples over any two axes that differ, and cells that lead to their runs."""

from pathlib import Path

import pytest

import cacheprobe as cp
from cacheprobe.views.dashboard.questions import CannotShow
from cacheprobe.views.dashboard.run_list import RunList
from cacheprobe.views.dashboard.tabs import results
from cacheprobe.views.sweep_grid import in_order

SETTINGS = {
    "grid": {
        "model": "coinflip-plain",
        "task": "coin_flip:people=2",
        "drafter": ["none", "ngram"],
        "window": 4,
        "seed": [0, 1],
    },
    "run": {"n": 1, "max_new_tokens": 2, "capacity": 64, "capture": "Z"},
}


def test_an_axis_of_many_values_is_shown_in_stretches(tmp_path: Path) -> None:
    """An axis of more than eight values was no facet at all, and layer=10 stood before layer=2."""
    grid = {**SETTINGS["grid"], "drafter": "none", "intervention": ["none", "zero:site=T,layer=1"], "seed": "0-9"}
    assert cp.sweep({**SETTINGS, "grid": grid}, out=tmp_path / "s", progress=False).is_complete
    run_list = RunList.of([tmp_path / "s"])

    def shown(facet: str) -> tuple[set[str], str, str]:
        said = results.result_view(run_list, {"result": 0, "facet": facet}).draw()
        curves = said["graphs"][0]["props"]["children"]["props"]["figure"]["data"]
        return {curve["name"].split(", ")[1] for curve in curves}, said["html"], said["more"]

    names, html, more = shown("intervention.seed")
    assert names == {f"seed={seed}" for seed in range(8)} and more.count("<tr><td>") == 16
    assert 'data-value="intervention.seed.0.1">8 to 9</button>' in html and "intervention.seed.1." not in html
    names, html, more = shown("intervention.seed.0.1")
    assert names == {"seed=8", "seed=9"} and more.count("<tr><td>") == 4
    assert 'class="plain chosen" data-intent="set" data-name="facet" data-value="intervention.seed.0.1"' in html
    for wrong in ("intervention.seed.0.2", "intervention.seed.1.0", "intervention.seed.0.-1", "intervention.seed.0.²"):
        with pytest.raises(CannotShow, match=r"there is no stretch '.*' of (seed|intervention); there are 0 to [01]"):
            results.result_view(run_list, {"result": 0, "facet": wrong}).draw()
    for wrong in ("intervention.seed.0", "seed.seed"):
        with pytest.raises(CannotShow, match=f"there is no facet '{wrong}'; there are"):
            results.result_view(run_list, {"result": 0, "facet": wrong}).draw()
    values = ["zero:layer=10", "none", "zero:layer=9", 16, 4]
    assert in_order(values) == [4, 16, "none", "zero:layer=9", "zero:layer=10"]
