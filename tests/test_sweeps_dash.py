"""The dashboard's sweep tab: small multiples over any two axes that differ, and cells that lead to their runs."""

from pathlib import Path

import pytest

import cacheprobe as cp
from cacheprobe.dash_app import results
from cacheprobe.dash_app.shelf import NotAsked, Shelf

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


def test_the_sweep_tab(tmp_path: Path) -> None:
    assert cp.sweep(SETTINGS, out=tmp_path / "s", progress=False).is_complete
    shelf = Shelf.of([tmp_path / "s"])
    assert [results.kind_of(path) for path in shelf.results] == ["sweep"]
    assert len(shelf.entries) == 4 and all(entry.book is not None for entry in shelf.entries)
    said = results.view(shelf, {"result": 0, "facet": "seed.drafter"})
    assert said["more"].count('data-intent="open"') == 4 and 'data-value="drafter.seed"' in said["html"]
    curves = said["graphs"][0]["props"]["children"]["props"]["figure"]["data"]
    assert [curve["name"] for curve in curves] == [
        f"seed={seed}, drafter={drafter}" for seed in (0, 1) for drafter in ("ngram", "none")
    ]
    with pytest.raises(NotAsked, match=r"no facet 'seed.seed'; there are drafter.seed, seed.drafter"):
        results.view(shelf, {"result": 0, "facet": "seed.seed"})
    assert shelf.book(2).run is not None
