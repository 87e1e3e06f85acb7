"""The same bytes from Ray, and in an object store that has no rename and refuses requests."""

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import cacheprobe as cp
from cacheprobe.sweeps.backends.on_ray import TRIES_VARIABLE
from cacheprobe.sweeps.storage.lease import LEASES, SweepBusy, leased, renewed
from cacheprobe.sweeps.storage.lock import only_sweep
from cacheprobe.sweeps.storage.store import SHARDS, SweepStore
from cacheprobe_benchmarks.sweeps.s3_server import BUCKET, environment, s3_server
from tests.sweeps.test_sweeps import SMALL, digests


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("serial") / "sweep"
    assert cp.sweep(SMALL, out=out, progress=False).is_complete
    return out


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The bucket's folder, behind a server that refuses every fifth request."""
    with s3_server(tmp_path, fail_each=5) as (env, counts):
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        yield tmp_path / BUCKET
        assert counts()["refused"] > 0


def lease(holder: str, seconds: float) -> bytes:
    return json.dumps({"holder": holder, "until": time.time() + seconds}).encode()


def test_an_object_store_holds_the_bytes_that_a_folder_holds(serial: Path, s3: Path) -> None:
    url = f"s3://{BUCKET}/one"
    assert cp.sweep(SMALL, out=url, progress=False).is_complete
    assert digests(s3 / "one") == digests(serial)
    assert not list((s3 / "one").glob(f"{LEASES}/*"))
    results = cp.load_sweep(url)
    assert len(results.query("select * from rows join cells using (digest)")) == len(
        cp.load_sweep(serial).query("select * from rows")
    )
    assert results.trace(results.cells.digest[0]).states("S", 1, 0).shape[1] == 64


def test_a_shard_whose_manifest_was_not_put_does_not_count_and_a_lease_is_kept(s3: Path) -> None:
    url = f"s3://{BUCKET}/two"
    store = SweepStore(url)
    store.write(f"{SHARDS}/aa/rows.parquet", b"half")
    store.write(f"{SHARDS}/bb/manifest.json", b"{}")
    assert store.committed() == {"bb"}
    store.write(f"{LEASES}/00000007.json", lease("another", 3600))
    with pytest.raises(SweepBusy, match="another writes to s3://.* until its lease"):
        cp.sweep(SMALL, out=url, progress=False)


@pytest.mark.parametrize("ran_out", [False, True], ids=["of a new place", "that ran out"])
def test_of_many_that_want_a_lease_at_once_one_gets_it(s3: Path, ran_out: bool) -> None:
    url = f"s3://{BUCKET}/three"
    if ran_out:
        SweepStore(url).write(f"{LEASES}/00000007.json", lease("killed", -1))
    many, over = 6, threading.Event()
    together, held, refused = threading.Barrier(many), [], []

    def decided() -> None:
        if len(held) + len(refused) == many:
            over.set()

    def want() -> None:
        store = SweepStore(url)
        together.wait()
        try:
            with leased(store):
                held.append(store)
                decided()
                over.wait()
        except Exception as error:  # of any kind: nobody may wait for ever
            refused.append(str(error))
            decided()

    threads = [threading.Thread(target=want) for _ in range(many)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(held) == 1 and len(refused) == many - 1 and all("writes to" in why or "began" in why for why in refused)
    assert not list((s3 / "three").glob(f"{LEASES}/*"))


def test_a_lease_that_another_took_over_is_not_renewed(s3: Path) -> None:
    store = SweepStore(f"s3://{BUCKET}/four")
    with leased(store):
        (mine,) = store.fs.find(store.path(LEASES))
        holder = json.loads(store.fs.cat_file(mine))["holder"]
        name = mine.removeprefix(f"{store.root}/")
        assert renewed(store, name, holder)
        store.write(f"{LEASES}/00000002.json", lease("another", 60))
        assert not renewed(store, name, holder)
    assert store.read_json(f"{LEASES}/00000002.json")["holder"] == "another"


def test_a_store_that_ignores_conditions_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """rclone answers a put on a condition with 200 and overwrites."""
    url = f"s3://{BUCKET}/five"
    with s3_server(tmp_path, is_conditional=False) as (env, _):
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ValueError, match=r"s3://sweeps/five ignores conditions on a put .*--alone"):
            cp.sweep(SMALL, out=url, progress=False)
        assert not any(path.is_file() for path in (tmp_path / BUCKET).rglob("*"))
        with only_sweep(SweepStore(url), alone=True):
            assert not any(path.is_file() for path in (tmp_path / BUCKET).rglob("*"))
    with pytest.raises(ValueError, match="is a folder, .* leave out alone"):
        cp.sweep(SMALL, out=tmp_path / "s", alone=True, progress=False)


def test_a_store_that_lets_nobody_in_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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


def test_ray_commits_the_bytes_that_one_process_commits(serial: Path, tmp_path: Path) -> None:
    """On two local nodes of one CPU each, so that both are needed."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        report = cp.sweep(SMALL, out=tmp_path / "s", backend="ray", address=cluster.address, workers=2, progress=False)
        assert report.is_complete, report
    finally:
        cluster.shutdown()
    assert digests(tmp_path / "s") == digests(serial)


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


@pytest.mark.slow
@pytest.mark.timeout(600)  # a guard: Ray itself would wait for a quarter of an hour
def test_a_head_node_that_falls_silent_while_it_is_joined_ends_the_sweep(tmp_path: Path) -> None:
    """As where it is lost in that very moment: something listens, and never says a word."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        report = cp.sweep(SMALL, out=tmp_path / "s", backend="ray", address=address, progress=False)
    assert (
        report.stopped_by.startswith("the Ray cluster at 127.0.0.1:") and "could not be joined: " in report.stopped_by
    )
    assert TRIES_VARIABLE not in os.environ
