"""A shard is whole or absent, and has the same bytes in a folder, in an object store, from Ray, and after a kill."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

import cacheprobe as cp
from cacheprobe.sweeps.store import SHARDS, SweepStore
from cacheprobe.trace.manifest import MANIFEST
from cacheprobe_benchmarks.sweeps.sweep_backends import BUCKET, environment, s3_server, two_nodes
from tests.sweeps.test_sweeps import SMALL, digests

FILES = {"rows.parquet": b"rows", "states.safetensors": b"states", MANIFEST: b"{}"}


def build(directory: Path, files: dict[str, bytes] = FILES) -> None:
    directory.mkdir()
    for name, data in files.items():
        (directory / name).write_bytes(data)


def held(store: SweepStore, digest: str) -> dict[str, bytes]:
    return {Path(p).name: store.fs.cat_file(p) for p in store.fs.find(store.path(f"{SHARDS}/{digest}"))}


@pytest.fixture(params=["folder", "object store"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> SweepStore:
    return SweepStore(tmp_path / "s" if request.param == "folder" else f"memory://{tmp_path.name}")


class Cut(BaseException):
    """What a kill looks like from within."""


def test_a_commit_that_is_cut_leaves_nothing_that_counts(store: SweepStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for last in range(len(FILES)):
        puts = 0

        def cut(*args: Any, real: Any = store.fs.pipe_file, last: int = last) -> None:
            nonlocal puts
            puts += 1
            if puts > last:
                raise Cut
            real(*args)

        def cut_build(directory: Path, last: int = last) -> None:
            build(directory, dict(list(FILES.items())[:last]))
            raise Cut

        with monkeypatch.context() as patch, pytest.raises(Cut):
            patch.setattr(store.fs, "pipe_file", cut)
            store.commit("aa", cut_build if store.is_local else build)
        assert store.committed() == set()
    assert store.commit("aa", build) == sum(map(len, FILES.values()))
    assert store.committed() == {"aa"} and held(store, "aa") == FILES


def test_a_shard_that_is_there_is_left_and_half_a_one_is_replaced(store: SweepStore) -> None:
    store.commit("aa", build)
    store.commit("aa", build)  # by another worker, which began when nothing was there
    assert held(store, "aa") == FILES
    store.write(f"{SHARDS}/bb/rows.parquet", b"half")
    assert store.committed() == {"aa"}
    store.commit("bb", build)
    assert store.committed() == {"aa", "bb"} and held(store, "bb") == FILES
    assert not store.is_local or not list(Path(store.path(".staging")).iterdir())


def children(pid: int) -> list[int]:
    """Returns the processes below a process, those that they started included."""
    below = [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return below + [other for one in below for other in children(one)]


def sweep_in_process(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    """Gives the command of SMALL in a process of its own."""
    (folder / "sweep.yaml").write_text(yaml.safe_dump(SMALL), encoding="utf-8")
    command = [sys.executable, "-m", "cacheprobe.cli.app", "sweep", str(folder / "sweep.yaml")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen([*command, "--out", str(folder / "s"), "--no-progress", *words], env=env)


def await_shards(folder: Path, number: int, driver: subprocess.Popen[bytes]) -> None:
    """Waits until so many cells are committed. Raises: AssertionError if the sweep ends before."""
    while len(list((folder / "s" / SHARDS).glob("*"))) < number:
        assert driver.poll() is None
        time.sleep(0.001)


@pytest.mark.parametrize("number", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_killed_sweep_goes_on_to_the_same_bytes(number: int, serial: Path, tmp_path: Path) -> None:
    with sweep_in_process(tmp_path) as driver:
        (tmp_path / "s").mkdir()
        if number:
            await_shards(tmp_path, number, driver)
        else:  # it has just begun to write
            while not any((tmp_path / "s").rglob("*.parquet")):
                assert driver.poll() is None
        driver.kill()
    assert driver.returncode == -signal.SIGKILL
    report = cp.sweep(SMALL, out=tmp_path / "s", progress=False)
    assert report.is_complete and report.skipped >= number and digests(tmp_path / "s") == digests(serial)
    assert not (tmp_path / "s" / ".staging").exists()


@pytest.mark.slow
def test_the_cell_of_a_killed_ray_worker_is_run_again(serial: Path, tmp_path: Path) -> None:
    """Ray, which the sweep starts itself, starts another worker; without retries, the cell is reported."""
    with sweep_in_process(tmp_path, "--backend", "ray", "--workers", "1") as driver:
        while not (at := [pid for pid in children(driver.pid) if is_at_work(pid)]):
            assert driver.poll() is None
            time.sleep(0.01)
        os.kill(at[0], signal.SIGKILL)
        assert driver.wait() == 0
    assert digests(tmp_path / "s") == digests(serial)


def is_at_work(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::CellRunner.run")
    except OSError:
        return False


def test_ray_on_two_nodes_commits_the_bytes_that_one_process_commits(serial: Path, tmp_path: Path) -> None:
    """Nodes of one CPU each, so that both are needed."""
    with two_nodes() as address:
        report = cp.sweep(SMALL, out=tmp_path / "s", backend="ray", address=address, workers=2, progress=False)
    assert report.is_complete and digests(tmp_path / "s") == digests(serial)


def test_an_object_store_holds_the_bytes_that_a_folder_holds(
    serial: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://{BUCKET}/one"
    with s3_server(tmp_path) as env:
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        assert cp.sweep(SMALL, out=url, progress=False).is_complete
        assert digests(tmp_path / BUCKET / "one") == digests(serial)
        results = cp.load_sweep(url)
        rows = cp.load_sweep(serial).query("select * from rows")
        assert len(results.query("select * from rows join cells using (digest)")) == len(rows)
        assert results.trace(results.cells.digest[0]).states("S", 1, 0).shape[1] == 64


def test_a_store_that_lets_nobody_in_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's own error is no OSError, and was a page of its innards."""

    class Closed(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(403)

        do_PUT = do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Closed)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name, value in environment(server.server_port).items():
        monkeypatch.setenv(name, value)
    try:
        for ask in (lambda url: cp.sweep(SMALL, out=url, progress=False), cp.load_sweep):
            with pytest.raises(OSError, match=f"s3://{BUCKET}/x does not answer as it should.*403") as refused:
                ask(f"s3://{BUCKET}/x")
            assert "\n" not in str(refused.value)
    finally:
        server.shutdown()


def test_an_address_where_no_cluster_is_ends_the_sweep_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself tries for a quarter of an hour, without a word; so it is never asked."""
    import ray

    joined: list[object] = []
    monkeypatch.setattr(ray, "init", lambda *args, **settings: joined.append(settings))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    report = cp.sweep(SMALL, out=tmp_path / "s", backend="ray", address=address, progress=False)
    assert joined == []
    assert report.stopped_by.startswith(f"no head node of a Ray cluster answers at {address} (")
    assert report.exit_code != 0
