"""Does a sweep survive what kills it? Every cell exactly once, byte for byte that of an undisturbed serial run.

Each fault strikes a fresh sweep at a random moment of its work, `rounds` times; then the same command is given again
until it says that it is complete, and the shards are compared.
"""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cacheprobe_benchmarks.machine import machine, measuring
from cacheprobe_benchmarks.s3_server import s3_server

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
CELLS = 16
MOST_RESUMES = 5
SEED = 0


class Struck:
    """A sweep in a process of its own, in a folder of its own."""

    def __init__(self, folder: Path, **env: str) -> None:
        self.folder, self.env = folder, env
        self.url = str(folder / "sweep")
        folder.mkdir(parents=True)
        (folder / "sweep.yaml").write_text(json.dumps(CONFIG))

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "cacheprobe.cli", "sweep", str(self.folder / "sweep.yaml"), "--out", self.url]
        env = {**os.environ, **self.env, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        log = (self.folder / "log.txt").open("ab")
        return subprocess.Popen([*command, "--no-progress", *words], stdout=log, stderr=log, env=env)

    def finish(self, *words: str) -> int:
        """Give the command again until it is complete; how often that was."""
        for count in range(1, MOST_RESUMES + 1):
            if self.start(*words).wait() == 0:
                return count
        raise RuntimeError(
            f"not complete after {MOST_RESUMES} resumes: {(self.folder / 'log.txt').read_text()[-2000:]}"
        )

    def shards(self) -> dict[str, str]:
        return digests(Path(self.url) / "shards")


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below a folder, by its name."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def run(rounds: int) -> dict[str, Any]:
    """The table: for each fault, how often it struck, resumes that were needed, and whether the bytes are equal."""
    chance = random.Random(SEED)
    with tempfile.TemporaryDirectory(prefix="cacheprobe-faults-") as held:
        folder = Path(held)
        whole = Struck(folder / "serial")
        began = time.perf_counter()
        whole.finish()
        seconds, wanted = time.perf_counter() - began, whole.shards()
        table = {}
        with measuring(len(FAULTS)) as bar:
            for name, fault in FAULTS.items():
                table[name] = _strike(fault, rounds, folder / name.replace(" ", "-"), wanted, chance, seconds)
                bar.advance(note=f"{name}: {table[name]}")
    cells = len({name.split("/")[0] for name in wanted})
    return {"benchmark": "sweep-faults", "rounds": rounds, "cells": cells, "serial_seconds": round(seconds, 1),
            **machine(), "faults": table}  # fmt: skip


Fault = Callable[[Path, random.Random, float], "tuple[dict[str, str], int, int] | str"]
"""Of (folder, chance, seconds of the serial run): the shards' digests, times that it struck, resumes; or why not."""


def _strike(fault: Fault, rounds: int, folder: Path, wanted: Any, chance: random.Random, seconds: float) -> Any:
    struck = resumes = equal = 0
    for number in range(rounds):
        said = fault(folder / str(number), chance, seconds)
        if isinstance(said, str):
            return {"not_tried": said}
        shards, count, again = said
        struck, resumes, equal = struck + count, resumes + again, equal + (shards == wanted)
    return {"struck": struck, "resumes": resumes, "equal_to_serial": f"{equal} of {rounds}"}


def _kill_worker(folder: Path, chance: random.Random, seconds: float) -> tuple[dict[str, str], int, int]:
    sweep = Struck(folder)
    driver = sweep.start("--backend", "processes")
    _await(sweep, driver, chance)
    workers = _children(driver.pid)
    for pid in workers[:1]:
        os.kill(pid, signal.SIGKILL)
    code = driver.wait()
    return _ended(sweep, code, len(workers[:1]), "--backend", "processes")


def _kill_driver(folder: Path, chance: random.Random, seconds: float) -> tuple[dict[str, str], int, int]:
    sweep = Struck(folder)
    driver = sweep.start("--backend", "processes")
    _await(sweep, driver, chance)
    is_running = driver.poll() is None
    driver.kill()
    code = driver.wait()
    return _ended(sweep, code, int(is_running), "--backend", "processes")


def _kill_ray_node(folder: Path, chance: random.Random, seconds: float) -> "tuple[dict[str, str], int, int] | str":
    try:
        from ray.cluster_utils import Cluster
    except ModuleNotFoundError:
        return "Ray is not installed"
    sweep = Struck(folder)
    with _two_nodes(Cluster) as (cluster, node):
        words = ("--backend", "ray", "--address", cluster.address)
        driver = sweep.start(*words)
        _await(sweep, driver, chance)
        is_running = driver.poll() is None
        cluster.remove_node(node, allow_graceful=False)
        return _ended(sweep, driver.wait(), int(is_running), *words)


@contextmanager
def _two_nodes(cluster_of: Any) -> Iterator[tuple[Any, Any]]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    cluster = cluster_of(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        yield cluster, cluster.add_node(num_cpus=1)
    finally:
        cluster.shutdown()


def _fill_disk(folder: Path, chance: random.Random, seconds: float) -> "tuple[dict[str, str], int, int] | str":
    """A file system of a few megabytes, most of it taken; the sweep goes on once that is given back."""
    folder.mkdir(parents=True)
    small = folder / "small"
    small.mkdir()
    size, left = 64_000_000, chance.randint(300_000, 1_500_000)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(small)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        return f"no small file system could be mounted: {mounted.stderr.strip()}"
    try:
        sweep = Struck(small / "held")
        filler = small / "filler"
        filler.write_bytes(b"\0" * (size - left - 100_000))
        code = sweep.start().wait()
        filler.unlink()
        return _ended(sweep, code, int(code == 3 or code == 1))
    finally:
        subprocess.run(["umount", str(small)], check=True)


def _refuse_requests(folder: Path, chance: random.Random, seconds: float) -> "tuple[dict[str, str], int, int] | str":
    try:
        with s3_server(folder / "s3", fail_each=5) as (env, counts):
            sweep = Struck(folder / "driver", **env)
            sweep.url = "s3://sweeps/x"
            code = sweep.start().wait()
            resumes = 0 if code == 0 else sweep.finish()
            refused = counts()["refused"]
    except ValueError as error:
        return str(error)
    return digests(folder / "s3" / "sweeps" / "x" / "shards"), refused, resumes


def _ended(sweep: Struck, code: int, struck: int, *words: str) -> tuple[dict[str, str], int, int]:
    resumes = 0 if code == 0 else sweep.finish(*words)
    return sweep.shards(), struck, resumes


def _await(sweep: Struck, driver: subprocess.Popen[bytes], chance: random.Random) -> None:
    """Until a random number of cells are committed, and a random moment more; or the sweep is over."""
    wanted, moment = chance.randrange(CELLS - 4), chance.uniform(0, 0.5)
    while driver.poll() is None and len(list(Path(sweep.url).glob("shards/*"))) < wanted:
        time.sleep(0.02)
    time.sleep(moment)


def _children(pid: int) -> list[int]:
    """Worker processes of a sweep's driver."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
            words = (path.parent / "cmdline").read_text()
        except OSError:
            continue
        if int(fields[1]) == pid and "cacheprobe.sweeps.worker" in words:
            found.append(int(path.parent.name))
    return sorted(found)


FAULTS: dict[str, Fault] = {
    "SIGKILL of a worker": _kill_worker,
    "SIGKILL of the driver": _kill_driver,
    "SIGKILL of a Ray node": _kill_ray_node,
    "full disk": _fill_disk,
    "S3 refuses each fifth request": _refuse_requests,
}
