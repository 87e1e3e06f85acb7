"""Numbers and paths that mean nothing are refused by name, and tables that no run has are there, empty."""

from pathlib import Path

import pytest
import torch

import cacheprobe as cp
from cacheprobe.analysis.exports import to_neuronpedia
from tests.sweeps.test_sweeps import RUN
from tests.tiny import SMALL, loaded

PROMPT = [1, 2, 3, 4, 5]


def rows() -> object:
    return cp.kv_snapshot(loaded(), PROMPT)


@pytest.mark.parametrize(
    "change",
    [
        lambda held: held.masked([1.5]),
        lambda held: held.masked(True),
        lambda held: held.masked("12"),
        lambda held: held.masked(1, layers=[1.7]),
        lambda held: held.edited(lambda x: x * 2, 1, heads=[0.9]),
        lambda held: held.cut(2.7),
        lambda held: held.cut(True),
    ],
)
def test_positions_of_cache_edits_are_whole_numbers(change) -> None:
    with pytest.raises(ValueError, match="must be a whole number, got"):
        change(rows())


def test_a_cache_edit_that_returns_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="layer 0 K: the change made None of"):
        rows().edited(lambda x: None, [1])


@pytest.mark.parametrize("path", ["", 5, b"x"])
def test_a_dictionary_goes_to_a_path(path: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    basis = cp.lenses.Dictionary.from_basis(torch.eye(32), "blocks.0.hook_resid_post")
    for call in (
        lambda: basis.save(path),
        lambda: to_neuronpedia(cp.run(loaded(), [PROMPT], capture="S", **SMALL), basis, [0], path),
        lambda: cp.patching.activation(loaded(), PROMPT, [1, 2, 3, 4, 6], answer=(7, 8), store=path, progress=False),
    ):
        with pytest.raises(ValueError, match="must be the path of a folder"):
            call()
    assert not list(tmp_path.iterdir())


def test_a_query_finds_the_tables_that_no_run_has(tmp_path: Path) -> None:
    grid = {"model": "coinflip-plain", "task": "coin_flip:people=2", "window": 4}
    cp.sweep({"grid": grid, "run": {**RUN, "capture": "S"}}, out=tmp_path / "s", progress=False)
    found = cp.load_sweep(tmp_path / "s")
    for table in ("hypotheses", "thoughts"):
        empty = found.query(f"select * from {table}")
        assert empty.empty and {"digest", "row"} <= set(empty.columns)
    assert len(found.query("select * from rows join hypotheses using (digest, row)")) == 0
