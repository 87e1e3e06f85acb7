"""Does a sweep survive what kills it? Every cell exactly once, byte for byte that of an undisturbed serial run.

Each fault strikes a fresh sweep at a random moment of its work, `rounds` times; then the same command is given again
until it says that it is complete, and the shards are compared.
"""

import os
import random
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cacheprobe_benchmarks.shared.machine import machine, measuring
from cacheprobe_benchmarks.sweeps import ray_faults
from cacheprobe_benchmarks.sweeps.s3_server import BUCKET, s3_server
from cacheprobe_benchmarks.sweeps.struck import Fault, FaultOutcome, Struck, digests

SEED = 0
SMALL = {"only": ("SIGKILL of a worker", "SIGKILL of the driver")}


def run(rounds: int, *, only: Sequence[str] = ()) -> dict[str, Any]:
    """The table: for each fault how often it struck (for S3, the requests refused), how the struck starts exited, how
    often the command had to be given again, and in how many rounds the bytes are equal in the end.

    only: these faults.
    """
    chosen = {name: FAULTS[name] for name in only or FAULTS}
    with tempfile.TemporaryDirectory(prefix="cacheprobe-faults-") as held, measuring(len(chosen) * rounds) as bar:
        whole = Struck(Path(held) / "serial")
        began = time.perf_counter()
        whole.finish()
        seconds, wanted = time.perf_counter() - began, digests(Path(whole.url))
        table = {}
        for name, fault in chosen.items():
            chance = random.Random(f"{SEED} {name}")
            outcomes: list[FaultOutcome] = []
            for number in range(rounds):
                outcome = fault(Path(held) / name.replace(" ", "-") / str(number), chance)
                bar.advance(note=name)
                if isinstance(outcome, str):
                    table[name] = {"not_tried": outcome}
                    break
                outcomes.append(outcome)
            else:
                table[name] = _row(outcomes, wanted)
    cells = len({name.split("/")[0] for name in wanted})
    return {"benchmark": "sweep-faults", "rounds": rounds, "cells": cells, "serial_seconds": round(seconds, 1),
            **machine(), "faults": table}  # fmt: skip


def _row(outcomes: list[FaultOutcome], wanted: dict[str, str]) -> dict[str, Any]:
    codes = Counter(str(outcome.exit_code) for outcome in outcomes)
    return {
        "struck": sum(outcome.struck for outcome in outcomes),
        "exit_codes": dict(sorted(codes.items())),
        "resumes": sum(outcome.resumes for outcome in outcomes),
        "equal_to_serial": sum(outcome.shards == wanted for outcome in outcomes),
        "of": len(outcomes),
    }


def _kill_worker(folder: Path, chance: random.Random) -> FaultOutcome:
    sweep = Struck(folder, "--backend", "processes")
    driver = sweep.start()
    sweep.await_moment(driver, chance)
    workers = ray_faults.children(driver.pid, "cacheprobe.sweeps.workers.worker")[:1]
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    return sweep.outcome(driver.wait(), len(workers))


def _kill_driver(folder: Path, chance: random.Random) -> FaultOutcome:
    sweep = Struck(folder, "--backend", "processes")
    driver = sweep.start()
    is_running = sweep.await_moment(driver, chance)
    driver.kill()
    return sweep.outcome(driver.wait(), int(is_running))


def _fill_disk(folder: Path, chance: random.Random) -> FaultOutcome | str:
    """A file system of a few megabytes, most of it taken; the sweep goes on once that is given back."""
    small = folder / "small"
    small.mkdir(parents=True)
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
        return sweep.outcome(code, int(code != 0))
    finally:
        subprocess.run(["umount", str(small)], check=True)


def _refuse_requests(folder: Path, chance: random.Random) -> FaultOutcome | str:
    try:
        with s3_server(folder / "s3", fail_each=5) as (env, counts):
            sweep = Struck(folder / "driver", url=f"s3://{BUCKET}/x", **env)
            code = sweep.start().wait()
            resumes = 0 if code == 0 else sweep.finish()
            return FaultOutcome(digests(folder / "s3" / BUCKET / "x"), counts()["refused"], resumes, code)
    except ValueError as error:
        return str(error)


FAULTS: dict[str, Fault] = {
    "SIGKILL of a worker": _kill_worker,
    "SIGKILL of the driver": _kill_driver,
    "full disk": _fill_disk,
    "S3 refuses each fifth request": _refuse_requests,
    "Ray: SIGKILL of an actor": ray_faults.kill_actor,
    "Ray: a worker node is lost": ray_faults.lose_node,
    "Ray: the head node is lost": ray_faults.lose_head,
    "Ray: SIGKILL of the local node": ray_faults.kill_own_node,
}
