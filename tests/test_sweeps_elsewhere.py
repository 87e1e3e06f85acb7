"""The same bytes from Ray, and in an object store that has no rename and refuses requests."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import cacheprobe as cp
from cacheprobe.sweeps.lock import LEASE, SweepBusy
from cacheprobe.sweeps.store import SHARDS, SweepStore
from cacheprobe_benchmarks.s3_server import BUCKET, s3_server
from tests.test_sweeps import SMALL, digests


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


def test_an_object_store_holds_the_bytes_that_a_folder_holds(serial: Path, s3: Path) -> None:
    url = f"s3://{BUCKET}/one"
    assert cp.sweep(SMALL, out=url, progress=False).is_complete
    assert digests(s3 / "one") == digests(serial)
    assert not (s3 / "one" / LEASE).exists()
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
    store.write(LEASE, json.dumps({"holder": "another", "until": time.time() + 9}).encode())
    with pytest.raises(SweepBusy, match="another writes to s3://.* until its lease"):
        cp.sweep(SMALL, out=url, progress=False)


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
