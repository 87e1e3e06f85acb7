"""What a sweep does not do: commit what other code computed, exceed its budget, keep silent about what is missing."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cacheprobe.cli.sweep import query
from cacheprobe.sweeps import run_cell
from cacheprobe.sweeps.cells import libraries
from cacheprobe.sweeps.engine import dry_run, sweep
from cacheprobe.sweeps.plan import make_plan
from cacheprobe.sweeps.run_cell import run_and_commit
from cacheprobe.sweeps.settings import read_config
from cacheprobe.sweeps.store import SHARDS
from tests.sweeps.test_sweeps import SMALL


def test_a_worker_with_other_code_commits_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node where something else is installed, or a checkout that was edited since: the digest would not be true."""
    with monkeypatch.context() as there:
        there.setattr("cacheprobe.sweeps.cells.libraries", lambda: (("torch", "0.0"),))
        cell = next(iter(make_plan(read_config(SMALL)).cells.values()))
    outcome = run_and_commit(str(tmp_path / "s"), cell.to_json())
    assert outcome.cause == "another version" and not (tmp_path / "s").exists()
    assert "torch 0.0 is asked for and " in outcome.message and "begin it again" in outcome.message


def test_a_query_of_an_unfinished_sweep_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep(SMALL, out=tmp_path / "s", progress=False).is_complete
    capsys.readouterr()
    query(str(tmp_path / "s"), "select count(*) as n from cells")
    assert capsys.readouterr().err == ""
    shutil.rmtree(next((tmp_path / "s" / SHARDS).iterdir()))
    query(str(tmp_path / "s"), "select count(*) as n from cells")
    said = capsys.readouterr()
    assert "1 pending" in said.err and "2" in said.out
    with pytest.raises(ValueError, match="the query is empty"):
        query(str(tmp_path / "s"), " ")


@pytest.mark.parametrize("ask", [sweep, dry_run])
def test_no_workers_are_refused(ask: Callable[..., object], tmp_path: Path) -> None:
    for workers in (0, -1):
        with pytest.raises(ValueError, match=f"workers must be at least 1, got {workers}"):
            ask(SMALL, out=tmp_path / "s", backend="ray", workers=workers)


def test_digests_know_the_compiler_of_the_loops() -> None:
    """Products, readings and attention on a CPU are code that numba makes with LLVM."""
    assert {"torch", "numba", "llvmlite"} <= set(dict(libraries()))


def test_a_model_is_loaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells come in the order of the seeds, and are run in the order of the models."""
    loaded, real = [], run_cell.load_model
    monkeypatch.setattr(run_cell, "load_model", lambda name, **settings: loaded.append(name) or real(name, **settings))
    models = ("coinflip-plain", "coinflip-thinking")
    cells = [{**SMALL["grid"], "model": model, "seed": seed} for seed in (0, 1) for model in models]
    assert sweep({"cells": cells, "run": SMALL["run"]}, out=tmp_path / "s", progress=False).is_complete
    assert loaded == [*models] and not run_cell._MODEL
