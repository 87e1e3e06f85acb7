"""Faults of a Ray cluster: of an actor, of a node, of the head node, and of the node that a sweep started itself."""

import os
import random
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cacheprobe_benchmarks.sweeps.struck import FaultOutcome, Struck

NOT_HERE = "Ray is not installed"


@contextmanager
def two_nodes(port: int = 0) -> Iterator[tuple[Any, Any]]:
    """(cluster, its worker node), of one CPU each, so that two actors need both. port: of the head node; 0 for any.

    Raises: ModuleNotFoundError without Ray.
    """
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    head = {"num_cpus": 1, "include_dashboard": False, **({"gcs_server_port": port} if port else {})}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        yield cluster, cluster.add_node(num_cpus=1)
    finally:
        cluster.shutdown()


def kill_actor(folder: Path, chance: random.Random) -> FaultOutcome | str:
    """SIGKILL of one of the processes that hold a model. Ray starts another."""
    try:
        with two_nodes() as (cluster, node):
            sweep = Struck(folder, "--backend", "ray", "--address", cluster.address)
            driver = sweep.start()
            sweep.await_moment(driver, chance)
            raylets = [one.all_processes["raylet"][0].process.pid for one in (cluster.head_node, node)]
            actors = [pid for raylet in raylets for pid in children(raylet, "ray::Holder")]
            for pid in actors[:1]:
                os.kill(pid, signal.SIGKILL)
            return sweep.outcome(driver.wait(), len(actors[:1]))
    except ModuleNotFoundError:
        return NOT_HERE


def lose_node(folder: Path, chance: random.Random) -> FaultOutcome | str:
    """SIGKILL of a worker node. What its actor was at is done on the other."""
    try:
        with two_nodes() as (cluster, node):
            sweep = Struck(folder, "--backend", "ray", "--address", cluster.address)
            driver = sweep.start()
            is_running = sweep.await_moment(driver, chance)
            cluster.remove_node(node, allow_graceful=False)
            return sweep.outcome(driver.wait(), int(is_running))
    except ModuleNotFoundError:
        return NOT_HERE


def lose_head(folder: Path, chance: random.Random) -> FaultOutcome | str:
    """SIGKILL of the head node, which no sweep outlives; the command is given again to a new cluster at its address."""
    try:
        port = _free_port()
        with two_nodes(port) as (cluster, _):
            sweep = Struck(folder, "--backend", "ray", "--address", cluster.address)
            driver = sweep.start()
            is_running = sweep.await_moment(driver, chance)
            cluster.remove_node(cluster.head_node, allow_graceful=False)
            code = driver.wait()
        with two_nodes(port):
            return sweep.outcome(code, int(is_running))
    except ModuleNotFoundError:
        return NOT_HERE


def kill_own_node(folder: Path, chance: random.Random) -> FaultOutcome | str:
    """SIGKILL of all processes of the Ray node that a sweep without an address starts on this machine."""
    try:
        import ray  # noqa: F401
    except ModuleNotFoundError:
        return NOT_HERE
    sweep = Struck(folder, "--backend", "ray")
    driver = sweep.start()
    sweep.await_moment(driver, chance)
    node = children(driver.pid, f"{os.sep}ray{os.sep}")
    for pid in node:
        os.kill(pid, signal.SIGKILL)
    return sweep.outcome(driver.wait(), int(bool(node)))


def children(pid: int, said: str) -> list[int]:
    """Returns the processes that this one started and whose command line contains the text."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int(_stat(folder)[1]) == pid and said in command_line(int(folder.name)):
                found.append(int(folder.name))
        except OSError:
            continue
    return sorted(found)


def command_line(pid: int) -> str:
    """Returns the command line of a process that runs a program; '' for one that has ended.

    Linux shows an empty one for a moment after exec has closed the parent's pipe, that is after Popen has returned.
    """
    folder = Path("/proc", str(pid))
    while not (words := (folder / "cmdline").read_text()) and _stat(folder)[0] not in "ZX":
        time.sleep(0.001)
    return words


def _stat(folder: Path) -> list[str]:
    """Returns the fields of /proc/PID/stat from the state on."""
    return (folder / "stat").read_text().rpartition(")")[2].split()


def _free_port() -> int:
    with socket.socket() as held:
        held.bind(("", 0))
        return held.getsockname()[1]
