"""A sweep's cells are checked before any runs, run once, and committed whole: the same bytes whoever ran them."""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import cacheprobe as cp
from cacheprobe.core.registry import names as plug_in_names
from cacheprobe.models.hf.adapters import adapter_directory
from cacheprobe.ops.compiled.operations import choose
from cacheprobe.sweeps import cells as code
from cacheprobe.sweeps import engine, run_cell
from cacheprobe.sweeps.cells import Cell, combinations, distinguishing_labels
from cacheprobe.sweeps.engine import FAILED, PARTIAL, dry_run, sweep
from cacheprobe.sweeps.plan import make_plan
from cacheprobe.sweeps.run_cell import Outcome
from cacheprobe.sweeps.settings import read_config
from cacheprobe.sweeps.store import SHARDS, SweepBusy, SweepStore

RUN = {"n": 2, "max_new_tokens": 2, "capacity": 128, "capture": "SZ"}
GRID = {"model": "coinflip-plain", "task": "coin_flip:people=2", "window": 4}
SMALL = {"grid": {**GRID, "seed": [0, 1, 2]}, "run": RUN}


PACKAGE = "tests/fixtures/tuned_lens_package"
WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="it is about a machine without a GPU")


def digests(folder: Path) -> dict[str, str]:
    """Hash of every file of every committed shard, by its name below the folder."""
    files = [path for path in (folder / SHARDS).rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_what_is_committed_is_skipped_and_what_is_not_is_made_again(serial: Path, tmp_path: Path) -> None:
    """A shard without its manifest does not count: an object store may hold half of one."""
    out = shutil.copytree(serial, tmp_path / "s")
    broken = next((out / SHARDS).iterdir())
    (broken / "manifest.json").unlink()
    report = cp.sweep(SMALL, out=out, progress=False)
    assert (report.skipped, report.committed) == (2, 1) and digests(out) == digests(serial)
    assert cp.sweep(SMALL, out=out, progress=False).committed == 0


def test_a_shard_does_not_depend_on_what_its_process_ran_before(serial: Path, tmp_path: Path) -> None:
    backwards = {**SMALL, "grid": {**GRID, "seed": [2, 1, 0]}}
    cp.sweep(backwards, out=tmp_path / "s", progress=False)
    assert digests(tmp_path / "s") == digests(serial)


def test_a_shard_is_a_run(serial: Path) -> None:
    results = cp.load_sweep(serial)
    trace = results.trace(results.cells.digest[0])
    assert len(trace.requests) == 2 and trace.states("S", 1, 0).shape[1] == 64
    assert sorted(cell["seed"] for cell, _ in results.traces("seed > 0")) == [1, 2]


def test_cells_of_one_seed_read_the_same_prompts(tmp_path: Path) -> None:
    grid = {**GRID, "drafter": ["none", "ngram"], "intervention": ["none", "zero:site=T,layer=1"], "seed": [0, 1]}
    cp.sweep({"grid": grid, "run": RUN}, out=tmp_path / "s", progress=False)
    prompts: dict[int, set] = {0: set(), 1: set()}
    for cell, trace in cp.load_sweep(tmp_path / "s").traces():
        prompts[cell["seed"]].add(tuple(request.prompt_token_ids for request in trace.requests))
    assert len(prompts[0]) == len(prompts[1]) == 1 and prompts[0] != prompts[1]


def test_tables_are_asked_in_sql(serial: Path) -> None:
    results = cp.load_sweep(serial)
    assert sorted(results.query("select seed from cells").seed) == [0, 1, 2]
    said = results.query(
        "select seed, count(*) as n from hypotheses join cells using (digest) group by seed order by seed"
    )
    each = [len(results.trace(cell.digest).hypotheses()) for cell in results.cells.sort_values("seed").itertuples()]
    assert said.n.tolist() == each
    layers = results.query("select distinct layer from layers order by layer").layer.tolist()
    assert layers == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="cannot be answered"):
        results.query("select nothing from cells")
    assert results.query("select * from thoughts").empty
    with pytest.raises(ValueError, match="ideas does not exist"):
        results.query("select * from ideas")


def test_all_code_that_makes_a_shard_is_hashed() -> None:
    """Each part of the package that a run goes through is hashed, or is named here because it makes no bit of one."""
    others = {"sweeps", "cli", "views", "training", "__init__.py", "__main__.py", "__pycache__", "py.typed", "data"}
    assert {path.name for path in code._PACKAGE.iterdir()} - others == {p for p in code._PARTS if "/" not in p}


def test_another_code_version_is_kept_apart(serial: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = shutil.copytree(serial, tmp_path / "s")
    for module in ("cells", "plan", "run_cell"):
        monkeypatch.setattr(f"cacheprobe.sweeps.{module}.code_version", lambda: "another")
    one = {**SMALL, "grid": {**GRID, "seed": 0}}
    assert cp.sweep(one, out=out, progress=False).committed == 1
    results = cp.load_sweep(out)
    assert (len(results), results.num_others) == (1, 3)
    assert cp.load_sweep(out, all_versions=True).cells.code.nunique() == 2


def test_a_failed_cell_is_named_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = run_cell.run_cell

    def run(cell: Cell, model: Any) -> Any:
        if cell.axes["seed"] == 1:
            raise MemoryError("no more of it")
        return real(cell, model)

    monkeypatch.setattr(run_cell, "run_cell", run)
    report = sweep(SMALL, out=tmp_path / "s", progress=False)
    assert report.exit_code == PARTIAL and [f.cause for f in report.failures] == ["MemoryError"]
    assert f"  {report.failures[0].digest}  seed=1: no more of it" in str(report).splitlines()
    assert "give the same command again" in str(report)
    monkeypatch.setattr(run_cell, "run_cell", real)
    assert sweep(SMALL, out=tmp_path / "s", progress=False).skipped == 2


def test_a_full_disk_ends_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def commit(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(SweepStore, "commit", commit)
    report = sweep(SMALL, out=tmp_path / "s", progress=False)
    assert report.exit_code == FAILED and len(report.failures) == 1 and "2 not run: no space left" in str(report)


def test_ctrl_c_leaves_a_folder_that_goes_on(serial: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, seen = run_cell.run_cell, []

    def run(cell: Cell, model: Any) -> Any:
        if seen:
            raise KeyboardInterrupt
        seen.append(cell)
        return real(cell, model)

    monkeypatch.setattr(run_cell, "run_cell", run)
    report = sweep(SMALL, out=tmp_path / "s", progress=False)
    assert report.exit_code == PARTIAL and "2 not run: interrupted" in str(report)
    monkeypatch.setattr(run_cell, "run_cell", real)
    assert sweep(SMALL, out=tmp_path / "s", progress=False).is_complete and digests(tmp_path / "s") == digests(serial)


def test_two_sweeps_do_not_write_one_folder(tmp_path: Path) -> None:
    program = (
        "import sys; from cacheprobe.sweeps.store import SweepStore\n"
        "with SweepStore(sys.argv[1]).only_sweep(): print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(SweepBusy, match="another sweep writes"):
            sweep(SMALL, out=tmp_path, progress=False)
        other.kill()
    with SweepStore(tmp_path).only_sweep():
        pass


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ({"grdi": {}}, "unknown setting 'grdi' in .*; did you mean grid?"),
        ({"grid": {"modle": "x"}}, "unknown setting 'grid.modle' in .*; did you mean model?"),
        ({"grid": {}, "run": {"capcity": 3}}, "did you mean capacity?"),
        ({"grid": {}, "cells": [{}]}, "give either grid: .* or cells:"),
        ({}, "give either grid: .* or cells:"),
        ({"cells": []}, "cells is empty"),
        ({"grid": {"window": 0}}, "grid.window.* greater than or equal to 1, got 0"),
        ({"grid": {"dtype": "int8"}}, "grid.dtype"),
        ({"grid": {**GRID, "drafter": "early_exit:layer=5-2"}}, "'5-2' must be .* from the smaller to the larger"),
        ({"grid": {**GRID, "seed": -1}}, "grid.seed.0 .* greater than or equal to 0, got -1"),
        ({"grid": {**GRID, "seed": [0, 1.5]}}, "grid.seed.1 .* valid integer, got 1.5"),
        ({"grid": {**GRID, "seed": "9-0"}}, "grid.seed.*'9-0' must be .* from the smaller to the larger"),
        ({"grid": GRID, "run": {"stop": [""]}}, "run.stop.0 .* at least 1 character"),
        ({"grid": {**GRID, "products": "fast"}}, "grid.products.* 'auto' or 'torch', got 'fast'"),
        ({"grid": GRID, "run": {"device": "tpu"}}, "run.device .*, got 'tpu'"),
        ({"grid": GRID, "resources": {"num_gpus": 1}}, "takes GPUs, and run.device is the CPU"),
        pytest.param({"grid": GRID, "run": {"device": "cuda"}}, "finds no CUDA GPU here", marks=WITHOUT_GPU),
    ],
)
def test_what_is_not_understood_is_refused_by_its_place(held: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        sweep(held, out=tmp_path / "s", progress=False)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"drafter": "early_exits:layer=1"}, "unknown name 'early_exits'"),
        ({"drafter": "draft_model:length=3"}, "missing 1 required positional argument: 'model'"),
        ({"intervention": "zero:site=T,layer=1,haed=1"}, "unknown argument 'haed'; did you mean head"),
        ({"intervention": "swap:site=T,layer=1"}, "a sweep knows zero, add, mean, resample"),
        ({"intervention": "add:site=T,layer=1,value=x"}, "value must be a number, got 'x'"),
        ({"intervention": "zero:site=T,layer=1,positions=9-0"}, "'9-0' must be a number, or a range"),
        ({"lens": "jacobian:x"}, "takes logit, or a stored lens"),
        ({"lens": "later"}, "takes logit, or a stored lens"),
        ({"lens": "tuned:nowhere"}, "there is no directory nowhere"),
        ({"task": "coin_flips"}, "unknown name 'coin_flips'"),
        ({"model": "smollm2-135m", "adapter": "nowhere"}, "unknown adapter 'nowhere'"),
        ({"model": "./no/such"}, "there is no directory ./no/such; give an existing one"),
        ({"window": 600}, "window of 600 rows is larger than the capacity"),
    ],
)
def test_impossible_cells_are_refused_before_anything_runs(change: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"3 of 4 cells are impossible, nothing was run: .*" + message):
        mixed = [{**GRID}, *({**GRID, **change, "seed": seed} for seed in (0, 1, 2))]
        sweep({"cells": mixed, "run": RUN}, out=tmp_path / "s", progress=False)
    assert not (tmp_path / "s").exists()


def test_a_cell_that_does_not_fit_its_model_fails_by_itself(tmp_path: Path) -> None:
    """What only the loaded model tells is the error of its cell, and the others go on."""
    unfit = {
        "can stop after 0 to 2": {"drafter": "early_exit:layer=3"},
        "unknown layer 4": {"intervention": "zero:site=T,layer=4"},
        "prompt of 20": {"intervention": "zero:site=T,layer=1,positions=0-21"},
        "is for (layers, width)": {"lens": f"tuned:{PACKAGE}"},
        "128": {"task": "coin_flip:people=40"},
        "not in the task vocabulary": {"task": "boxes"},
    }
    cells = [GRID, *({**GRID, **change} for change in unfit.values())]
    report = sweep({"cells": cells, "run": RUN}, out=tmp_path / "s", progress=False)
    assert (report.committed, report.exit_code) == (1, PARTIAL)
    for part, failure in zip(unfit, report.failures, strict=True):
        assert part in failure.message


def test_cells_know_the_bytes_of_their_adapter(tmp_path: Path) -> None:
    shipped = adapter_directory("coin-flip", "smollm2-135m")
    for name in ("copy", "other"):
        shutil.copytree(shipped, tmp_path / name)
    (tmp_path / "other" / "adapter_config.json").write_text("{}")
    adapters = ["coin-flip", str(tmp_path / "copy"), str(tmp_path / "other")]
    plan = make_plan(read_config({"grid": {"adapter": adapters}, "run": {"n": 1}}))
    ours, copied, other = (cell.origin["sources"]["adapter"] for cell in plan.cells.values())
    assert ours == copied != other


def test_seeds_are_given_as_a_range_and_cells_named_by_what_differs() -> None:
    cells = make_plan(read_config({**SMALL, "grid": {**GRID, "drafter": ["none", "ngram"], "seed": ["0-2", 7]}})).cells
    said = sorted(distinguishing_labels(cells).values())
    assert said[:4] == [f"drafter=ngram seed={seed}" for seed in (0, 1, 2, 7)] and said[4] == "drafter=none seed=0"
    one = dict(list(cells.items())[:1])
    assert distinguishing_labels(one) == {digest: str(cell) for digest, cell in one.items()}


def test_a_disk_budget_stops_the_sweep(tmp_path: Path) -> None:
    tight = {**SMALL, "disk_budget_gb": 1e-8}
    report = sweep(tight, out=tmp_path / "s", progress=False)
    assert (report.committed, report.exit_code) == (1, PARTIAL) and "taken all of disk_budget_gb" in report.stopped_by
    assert "2 pending" in repr(cp.load_sweep(tmp_path / "s"))
    with pytest.raises(ValueError, match="above disk_budget_gb; raise it"):
        sweep(tight, out=tmp_path / "s", progress=False)
    assert "disk: about" in dry_run(tight, out=tmp_path / "s")


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    said = dry_run(SMALL, out=tmp_path / "s", backend="ray", workers=3)
    assert "3 cells, 0 of them committed" in said and "on 3 workers" in said and "disk: about" in said
    assert not (tmp_path / "s").exists()


def test_a_dry_run_counts_the_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading the model takes longer than all cells of a small sweep."""
    assert cp.sweep({**SMALL, "grid": {**GRID, "seed": 0}}, out=tmp_path / "s", progress=False).is_complete
    loads = [100.0, 0.0, 100.0, 0.0]
    monkeypatch.setattr(
        engine, "run_and_commit", lambda url, held: Outcome("", seconds=20.0, load_seconds=loads.pop(0))
    )
    said = dry_run(SMALL, out=tmp_path / "s")
    assert "3 cells, 1 of them committed" in said and "2 cells of 20.00 s, by one that was tried; 100 s to load" in said
    assert "time: about 2.3 min on 1 worker" in said  # 2 x 20 s and 100 s
    assert "time: about 2.0 min on 2 workers" in dry_run(SMALL, out=tmp_path / "s", backend="ray")


def test_layers_are_spread_and_cells_told_apart_by_all_that_changes_bits() -> None:
    config = read_config(
        {"grid": {**GRID, "drafter": ["none", "early_exit:layer=0-2"], "intervention": "zero:site=T,layer=1-2"}}
    )
    cells = list(combinations(config))
    assert len(cells) == 8 and cells[3]["drafter"] == "early_exit:layer=0"
    plans = [
        make_plan(read_config({**SMALL, **more}))
        for more in ({}, {"resources": {"threads": 2}}, {"resources": {"workers": 9}})
    ]
    assert plans[0].digest != plans[1].digest and plans[0].digest == plans[2].digest


def test_a_task_is_one_cell_however_its_name_is_written() -> None:
    """coin-flip and coin_flip were two, run one after the other."""
    told = [cell["task"] for cell in combinations(read_config({"grid": {"task": ["coin-flip", "coin_flip", "s3"]}}))]
    assert told == ["coin_flip", "s3"]
    listed = [{"task": "coin-flip:people=2"}, {"task": "coin_flip:people=2"}, {"task": "no-such-task"}]
    told = [cell["task"] for cell in combinations(read_config({"cells": listed}))]
    assert told == ["coin_flip:people=2", "no-such-task"]


def test_products_are_an_axis() -> None:
    """Other bits, another model to load."""
    axes = {"model": "smollm2-135m", "dtype": "bfloat16", "products": ["torch", "auto"]}
    torchs, autos = make_plan(read_config({"grid": axes, "run": RUN})).cells.values()
    assert torchs.model_key != autos.model_key and torchs.digest != autos.digest
    with pytest.raises(ValueError, match="'auto' or 'torch'"):
        read_config({"grid": {**axes, "products": ["compiled"]}, "run": RUN})


@pytest.mark.slow
def test_a_cell_runs_on_its_products(tmp_path: Path) -> None:
    axes = {"model": "smollm2-135m", "dtype": "bfloat16", "products": ["torch", "auto"], "task": GRID["task"]}
    sweep({"grid": axes, "run": {**RUN, "n": 1}}, out=tmp_path / "s", progress=False)
    found = {cell["products"]: trace.fingerprint for cell, trace in cp.load_sweep(tmp_path / "s").traces()}
    chosen = choose(torch.bfloat16, torch.device("cpu")).operations
    assert found["torch"]["products"] == "torch"
    assert found["auto"]["products"] == (chosen.text if chosen else "torch")


def test_a_shard_that_knows_fewer_axes_is_still_read(serial: Path, tmp_path: Path) -> None:
    """Its version had no such axis."""
    out = shutil.copytree(serial, tmp_path / "s")
    path = next((out / SHARDS).glob("*/manifest.json"))
    manifest = json.loads(path.read_text())
    del manifest["meta"]["sweep"]["cell"]["axes"]["products"]
    path.write_text(json.dumps(manifest))
    assert cp.load_sweep(out).cells["products"].isna().sum() == 1


def test_every_backend_is_a_plug_in() -> None:
    assert set(plug_in_names("sweeps.backends")) == {"serial", "ray"}
    with pytest.raises(ValueError, match="unknown name 'slurm'"):
        sweep(SMALL, out="nowhere", backend="slurm")
