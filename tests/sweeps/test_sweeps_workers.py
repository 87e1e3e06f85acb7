"""Which worker gets which cell, and what becomes of a cell whose worker dies."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import cacheprobe as cp
from cacheprobe.sweeps.backends.processes import DIED, processes
from cacheprobe.sweeps.cells import Cell
from cacheprobe.sweeps.events import Event
from cacheprobe.sweeps.facts import model_facts
from cacheprobe.sweeps.plan import make_plan
from cacheprobe.sweeps.settings import read_config
from cacheprobe.sweeps.storage.store import SweepStore
from cacheprobe.sweeps.workers.holder import Job
from cacheprobe.sweeps.workers.queue import Waiting
from cacheprobe_benchmarks.sweeps import sweep_backends
from cacheprobe_benchmarks.sweeps.ray_faults import NOT_HERE, children, command_line
from cacheprobe_benchmarks.sweeps.struck import CELLS
from cacheprobe_benchmarks.sweeps.sweep_faults import FAULTS, run
from tests.reported.tokenizers import build
from tests.sweeps.test_sweeps import RUN, SMALL, digests
from tests.tiny import hf_model

TWO_MODELS = {"model": ["coinflip-plain", "coinflip-thinking"], "task": "coin_flip:people=2", "window": 4}


def cells(models: str, each: int = 5) -> list[Cell]:
    """Of models of one letter, as they come from a grid whose last axis is the model; of one that is named twice, twice
    as many."""
    axes = {"dtype": "float32", "adapter": None, "products": "torch"}
    return [Cell({"model": m, "seed": s, **axes}, {"device": "cpu"}, {}) for s in range(each) for m in models]


def loads(waiting: Waiting, workers: int) -> tuple[int, list[Cell]]:
    """How many models are loaded where all workers are equally quick, and the cells in the order of their start."""
    held: list[object] = [None] * workers
    count, done = 0, []
    while True:
        given = 0
        for worker in range(workers):
            if (cell := waiting.take(held[worker])) is not None:
                count += cell.model_key != held[worker]
                held[worker] = cell.model_key
                done.append(cell)
                given += 1
        if not given:
            return count, done


@pytest.mark.parametrize(("models", "workers", "wanted"), [("abc", 1, 3), ("aab", 2, 3), ("abcd", 2, 4), ("a", 3, 3)])
def test_a_worker_goes_on_with_the_model_that_it_holds(models: str, workers: int, wanted: int) -> None:
    asked = cells(models)
    count, done = loads(Waiting(asked), workers)
    assert count == wanted and sorted(map(str, done)) == sorted(map(str, asked))


def test_what_is_put_back_comes_first_and_nothing_after_a_stop() -> None:
    waiting = Waiting(cells("a", 3))
    first = waiting.take()
    assert first is not None and len(waiting) == 2
    waiting.put_back(first)
    assert waiting.take() == first
    waiting.stop()
    assert waiting.take(first.model_key) is None and len(waiting) == 2


def test_a_model_is_loaded_once(tmp_path: Path) -> None:
    settings = {"grid": {**TWO_MODELS, "seed": [0, 1]}, "run": RUN}
    assert cp.sweep(settings, out=tmp_path / "s", progress=False).is_complete
    (log,) = (tmp_path / "s" / "events").glob("*.jsonl")
    ended = [said for line in log.read_text().splitlines() if (said := json.loads(line))["event"] == "ended"]
    assert [said["load_seconds"] > 0 for said in ended] == [True, False, True, False]


def test_a_process_is_found_as_soon_as_it_is_started() -> None:
    # about 1 in 100 has an empty command line at its first reading
    for _ in range(400):
        with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)", "wanted"]) as process:
            said = command_line(process.pid)
            process.kill()
        assert "wanted" in said


def killing(events: Iterator[Event], strikes: int) -> list[Event]:
    """All events; the worker is killed as soon as it is given a cell, so many times."""
    seen = []
    for event in events:
        seen.append(event)
        if event.event == "started" and strikes:
            (worker,) = children(os.getpid(), "cacheprobe.sweeps.workers.worker")
            os.kill(worker, signal.SIGKILL)
            strikes -= 1
    return seen


@pytest.mark.parametrize(("retries", "strikes", "is_kept"), [(1, 1, True), (0, 1, False), (1, 2, False)])
def test_a_cell_is_tried_again_as_often_as_asked(tmp_path: Path, retries: int, strikes: int, is_kept: bool) -> None:
    plan = make_plan(read_config({**SMALL, "grid": {**SMALL["grid"], "seed": 0}}))
    job = Job(str(tmp_path / "s"), 1, 1, 1, 0, retries)
    seen = killing(processes(Waiting(plan.cells.values()), job), strikes)
    assert sum(event.event == "worker_died" for event in seen) == strikes
    assert all("signal 9" in event.message for event in seen if event.event == "worker_died")
    (ended,) = [event.outcome for event in seen if event.event == "ended"]
    assert ended is not None and ended.is_committed == is_kept and ended.cause == ("" if is_kept else DIED)
    assert SweepStore(tmp_path / "s").committed() == (set(plan.cells) if is_kept else set())


@pytest.mark.parametrize(("asked", "given"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_a_worker_that_waits_leaves_its_core_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str | None, given: str
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY")
    if asked is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", asked)
    plan = make_plan(read_config({**SMALL, "grid": {**SMALL["grid"], "seed": 0}}))
    said = []
    for event in processes(Waiting(plan.cells.values()), Job(str(tmp_path / "s"), 1, 1, 1, 0, 0)):
        if event.event == "started":
            (worker,) = children(os.getpid(), "cacheprobe.sweeps.workers.worker")
            said.append(Path(f"/proc/{worker}/environ").read_bytes().split(b"\0"))
    assert said and all(f"OMP_WAIT_POLICY={given}".encode() in one for one in said)


def test_a_dead_workers_cell_is_the_cell_of_an_undisturbed_run(tmp_path: Path) -> None:
    cp.sweep(SMALL, out=tmp_path / "serial", progress=False)
    plan = make_plan(read_config(SMALL))
    job = Job(str(tmp_path / "s"), 1, 1, 1, 0, 1)
    killing(processes(Waiting(plan.cells.values()), job), 1)
    assert digests(tmp_path / "s") == digests(tmp_path / "serial")


def test_the_benchmark_of_backends_compares_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of one shard, and it does not call them equal."""

    def copied(folder: Path, places: list[sweep_backends.Place], flipped: int) -> sweep_backends.Place:
        shutil.copytree(places[0].held, folder)
        shard = next(folder.glob("shards/*/rows-*.parquet"))
        data = bytearray(shard.read_bytes())
        data[-20] ^= flipped
        shard.write_bytes(data)
        return places[0]._replace(held=folder)

    places: list[sweep_backends.Place] = []
    for flipped in (0, 1):

        def real(folder: Path) -> sweep_backends.Place:
            places[:] = [sweep_backends._serial(tmp_path / folder.parent.parent.name)]
            return places[0]

        backends = {"real": real, "copied": lambda folder, flipped=flipped: copied(folder, places, flipped)}
        monkeypatch.setattr(sweep_backends, "BACKENDS", backends)
        said = sweep_backends.run(1)
        assert said["are_equal"] == (not flipped) and said["backends"]["copied"]["cells"] == CELLS


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_of_the_benchmark_is_survived(name: str) -> None:
    row = run(1, only=[name])["faults"][name]
    if "not_tried" in row:  # Ray comes with the set-up; a small file system needs the right to mount one
        assert row["not_tried"] != NOT_HERE
        pytest.skip(row["not_tried"])
    assert (row["equal_to_serial"], row["of"]) == (1, 1)
    assert set(row["exit_codes"]) <= {"0", "3", "1", str(-signal.SIGKILL)}


def test_a_start_token_is_counted(tmp_path: Path) -> None:
    """Of a tokenizer that adds one, as that of SmolLM2 does not."""
    tokenizer = build("metaspace, start token added")
    for part in (hf_model(), tokenizer):
        part.save_pretrained(tmp_path)
    text = "the coin is heads"
    assert model_facts(str(tmp_path)).count_tokens(text) == len(tokenizer(text).input_ids)
    assert tokenizer(text).input_ids[0] == tokenizer.bos_token_id
