"""A small sweep in a process of its own, for faults to strike, and what is left of it."""

import hashlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

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
KEPT = {"shards", "index", "events", "sweep.json", ".lock", ".staging", "lease"}
"""All that a sweep leaves where its results go."""


class FaultOutcome(NamedTuple):
    """What became of a sweep that was struck."""

    shards: dict[str, str]
    """`digests` of the shards at the end."""
    struck: int
    """How often, or 0 where the sweep was over before."""
    resumes: int
    """How often the command was given again until it said complete."""
    exit_code: int
    """Of the start that was struck; negative for the signal that ended it."""


Fault = Callable[[Path, random.Random], FaultOutcome | str]
"""Of (folder, chance); a text says why the fault cannot be tried here."""


class Struck:
    """A sweep in a process of its own, in a folder of its own."""

    def __init__(self, folder: Path, *words: str, url: str = "", **env: str) -> None:
        self.folder, self.words, self.env = folder, words, env
        self.url = url or str(folder / "sweep")
        folder.mkdir(parents=True)
        (folder / "sweep.yaml").write_text(json.dumps(CONFIG))

    def start(self) -> subprocess.Popen[bytes]:
        """Give the command."""
        command = [
            sys.executable,
            "-m",
            "cacheprobe.cli.app",
            "sweep",
            str(self.folder / "sweep.yaml"),
            "--out",
            self.url,
        ]
        env = {**os.environ, **self.env, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with (self.folder / "log.txt").open("ab") as log:
            return subprocess.Popen([*command, "--no-progress", *self.words], stdout=log, stderr=log, env=env)

    def finish(self) -> int:
        """Give the command again until it is complete; how often that was."""
        for count in range(1, MOST_RESUMES + 1):
            if self.start().wait() == 0:
                return count
        raise RuntimeError(f"not complete after {MOST_RESUMES} resumes: {self.log()[-2000:]}")

    def outcome(self, code: int, struck: int) -> FaultOutcome:
        """Go on until it is complete."""
        resumes = 0 if code == 0 else self.finish()
        return FaultOutcome(digests(Path(self.url)), struck, resumes, code)

    def log(self) -> str:
        return (self.folder / "log.txt").read_text(errors="replace")

    def await_moment(self, driver: subprocess.Popen[bytes], chance: random.Random) -> bool:
        """Until a random number of cells are committed, and a random moment more. Whether the sweep still runs."""
        wanted, moment = chance.randrange(CELLS - 4), chance.uniform(0, 0.5)
        while driver.poll() is None and len(list(Path(self.url).glob("shards/*"))) < wanted:
            time.sleep(0.02)
        time.sleep(moment)
        return driver.poll() is None


def digests(sweep: Path) -> dict[str, str]:
    """SHA-256 of every file of every shard of a sweep, by its name. Raises: RuntimeError for anything left over."""
    if left := {path.name for path in sweep.iterdir()} - KEPT | {p.name for p in sweep.glob(".staging/*")}:
        raise RuntimeError(f"left over in {sweep}: {', '.join(sorted(left))}")
    shards = sweep / "shards"
    files = sorted(path for path in shards.rglob("*") if path.is_file())
    return {path.relative_to(shards).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
