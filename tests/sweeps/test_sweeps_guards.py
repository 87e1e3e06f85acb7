"""What a sweep does not do: commit what other code computed, exceed its budget, keep silent about what is missing."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import cacheprobe as cp
from cacheprobe.cli.sweep import query
from cacheprobe.models.known import shipped_folder
from cacheprobe.models.thinking.store import config_hash
from cacheprobe.sweeps import run_cell
from cacheprobe.sweeps.cells import libraries
from cacheprobe.sweeps.engine import PARTIAL, dry_run, sweep
from cacheprobe.sweeps.facts import model_facts
from cacheprobe.sweeps.plan import make_plan
from cacheprobe.sweeps.run_cell import run_and_commit
from cacheprobe.sweeps.settings import read_config
from cacheprobe.sweeps.store import SHARDS
from tests.reported.tokenizers import build
from tests.sweeps.test_sweeps import SMALL
from tests.tiny import hf_model


def test_a_worker_with_other_code_commits_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node where something else is installed, or a checkout that was edited since: the digest would not be true."""
    with monkeypatch.context() as there:
        there.setattr("cacheprobe.sweeps.cells.libraries", lambda: (("torch", "0.0"),))
        cell = next(iter(make_plan(read_config(SMALL)).cells.values()))
    outcome = run_and_commit(str(tmp_path / "s"), cell.to_json())
    assert outcome.cause == "another version" and not (tmp_path / "s").exists()
    assert "torch 0.0 is asked for and " in outcome.message and "begin it again" in outcome.message


def test_a_budget_that_was_estimated_too_low_stops_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a long window's drafts are nearly all rejected, a shard is several times what was estimated."""
    monkeypatch.setattr("cacheprobe.sweeps.plan.estimated_bytes", lambda *asked: 1)
    report = sweep({**SMALL, "disk_budget_gb": 1e-8}, out=tmp_path / "s", progress=False)
    assert (report.committed, report.exit_code) == (1, PARTIAL) and "taken all of disk_budget_gb" in report.stopped_by
    assert "2 pending" in repr(cp.load_sweep(tmp_path / "s"))


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


def test_an_intervention_where_nothing_is_verified_is_refused_before_anything_runs() -> None:
    asked = {**SMALL, "grid": {**SMALL["grid"], "intervention": "zero:site=T,layer=1,phases=verify"}}
    with pytest.raises(ValueError, match="nothing is verified without a drafter or run.deterministic"):
        make_plan(read_config(asked))
    make_plan(read_config({**asked, "grid": {**asked["grid"], "drafter": "early_exit:layer=1"}}))
    make_plan(read_config({**asked, "run": {**SMALL["run"], "deterministic": 1.0}}))


def test_a_thinking_model_that_does_not_fit_is_refused_before_anything_runs(tmp_path: Path) -> None:
    """A broken vocabulary was said to be none of a tokenizer's; a window, without the one to take instead."""
    shipped = shipped_folder("checkpoints", "coinflip-thinking")
    assert shipped is not None

    def refused(name: str, file: str, content: str, message: str) -> None:
        folder = shutil.copytree(shipped, tmp_path / name)
        (folder / file).write_text(content)
        with pytest.raises(ValueError, match=message):
            make_plan(read_config({**SMALL, "grid": {**SMALL["grid"], "model": str(folder), "window": 6}}))

    refused("words", "tokenizer.json", "{", "tokenizer.json has the hash .*; restore it, or train the model again")
    held = json.loads((shipped / "config.json").read_text())
    config = {**held["config"], "think_while_decoding": True}
    refused("edited", "config.json", json.dumps({**held, "config": config}), "edited after the training")
    held = {**held, "config": config, "config_sha256": config_hash(config)}
    refused("window", "config.json", json.dumps(held), "do not divide the window of 6; set window=8")


@pytest.mark.parametrize("ask", [sweep, dry_run])
def test_no_workers_are_refused(ask: Callable[..., object], tmp_path: Path) -> None:
    for workers in (0, -1):
        with pytest.raises(ValueError, match=f"workers must be at least 1, got {workers}"):
            ask(SMALL, out=tmp_path / "s", backend="ray", workers=workers)


def test_digests_know_the_compiler_of_the_loops() -> None:
    """Products, readings and attention on a CPU are code that numba makes with LLVM."""
    assert {"torch", "numba", "llvmlite"} <= set(dict(libraries()))


def test_a_start_token_is_counted(tmp_path: Path) -> None:
    """Of a tokenizer that adds one, as that of SmolLM2 does not."""
    tokenizer = build("metaspace, start token added")
    for part in (hf_model(), tokenizer):
        part.save_pretrained(tmp_path)
    text = "the coin is heads"
    assert model_facts(str(tmp_path)).count_tokens(text) == len(tokenizer(text).input_ids)
    assert tokenizer(text).input_ids[0] == tokenizer.bos_token_id


def test_a_model_is_loaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells come in the order of the seeds, and are run in the order of the models."""
    loaded, real = [], run_cell.load_model
    monkeypatch.setattr(run_cell, "load_model", lambda name, **settings: loaded.append(name) or real(name, **settings))
    models = ("coinflip-plain", "coinflip-thinking")
    cells = [{**SMALL["grid"], "model": model, "seed": seed} for seed in (0, 1) for model in models]
    assert sweep({"cells": cells, "run": SMALL["run"]}, out=tmp_path / "s", progress=False).is_complete
    assert loaded == [*models] and not run_cell._MODEL
