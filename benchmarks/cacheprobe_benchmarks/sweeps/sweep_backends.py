"""Does one file of settings give the same bytes in one process, in several, on two Ray nodes, in an object store?"""

import hashlib
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from cacheprobe_benchmarks.shared.machine import machine, measuring
from cacheprobe_benchmarks.sweeps.ray_faults import NOT_HERE, two_nodes
from cacheprobe_benchmarks.sweeps.s3_server import BUCKET, s3_server
from cacheprobe_benchmarks.sweeps.struck import CONFIG, Struck, digests

SMALL = {"only": ("serial", "processes")}


class Place(NamedTuple):
    """Where a sweep ran, complete."""

    held: Path
    """The folder that its shards are in."""
    seconds: float
    """Of the command, its start included."""


def run(rounds: int, *, only: tuple[str, ...] = ()) -> dict[str, Any]:
    """For each backend one digest of all files of all shards, by how many workers they were made, and the command's
    seconds; are_equal: whether all digests of all rounds are one.

    only: these backends.
    """
    chosen = {name: BACKENDS[name] for name in only or BACKENDS}
    table: dict[str, Any] = {}
    seen: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="cacheprobe-backends-") as held, measuring(len(chosen) * rounds) as bar:
        for name, give in chosen.items():
            rows = []
            for number in range(rounds):
                rows.append(_row(give, Path(held) / name.replace(" ", "-") / str(number)))
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


def _row(give: Callable[[Path], Place], folder: Path) -> dict[str, Any]:
    try:
        place = give(folder)
    except ModuleNotFoundError:
        return {"not_tried": NOT_HERE}
    except ValueError as error:
        return {"not_tried": str(error)}
    files = digests(place.held)
    every = "\n".join(f"{name} {digest}" for name, digest in sorted(files.items()))
    (log,) = (place.held / "events").glob("*.jsonl")
    events = map(json.loads, log.read_text(encoding="utf-8").splitlines())
    return {
        "cells": len({name.split("/")[0] for name in files}),
        "files": len(files),
        "digest": hashlib.sha256(every.encode()).hexdigest()[:20],
        "workers": len({event["worker"] for event in events if event["event"] == "ended"}),
        "seconds": place.seconds,
    }


def _complete(sweep: Struck, held: Path | None = None) -> Place:
    """Give the command once. Raises: RuntimeError where it does not say complete."""
    began = time.perf_counter()
    if sweep.start().wait():
        raise RuntimeError(f"the sweep is not complete: {sweep.log()[-2000:]}")
    return Place(held or Path(sweep.url), time.perf_counter() - began)


def _serial(folder: Path) -> Place:
    return _complete(Struck(folder))


def _processes(folder: Path) -> Place:
    return _complete(Struck(folder, "--backend", "processes"))


def _ray(folder: Path) -> Place:
    """On two nodes of one CPU each, so that two actors need both."""
    with two_nodes() as (cluster, _):
        return _complete(Struck(folder, "--backend", "ray", "--address", cluster.address))


def _object_store(folder: Path) -> Place:
    with s3_server(folder / "s3") as (env, _):
        return _complete(Struck(folder / "driver", url=f"s3://{BUCKET}/x", **env), folder / "s3" / BUCKET / "x")


BACKENDS: dict[str, Callable[[Path], Place]] = {
    "serial": _serial,
    "processes": _processes,
    "Ray on two nodes": _ray,
    "serial, in an object store": _object_store,
}
