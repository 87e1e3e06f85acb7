"""A run that is recorded to disk by another process, as far as a test lets it.

The process is `python -m tests.dashboard.growing_run DIR`. Each line on stdin is a number of parts to record; an empty
one records the rest. Prints the number of parts after each, 0 for a finished run.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import cacheprobe as cp
from cacheprobe.trace.journal import read_journal
from cacheprobe.trace.recording import disk_writer
from cacheprobe.trace.recording.background import Background
from cacheprobe.trace.recording.stream import Stream
from tests.tiny import PROMPTS, SMALL, loaded

SETTINGS: dict[str, Any] = {k: v for k, v in SMALL.items() if k != "progress"}
SETTINGS |= dict(
    max_new_tokens=16, draft_length=3, deterministic=[1], capture="SZ", drafter=cp.drafters.EarlyExit(layer=1)
)
MOST = 16 * len(PROMPTS)
"""Tokens of the whole run."""


def begun(directory: Path) -> Stream:
    """The stream of a run that is recorded."""
    return cp.stream(loaded(), PROMPTS, **SETTINGS, out=directory)


def part_each_round(patch: pytest.MonkeyPatch) -> None:
    """Writes parts in this process as soon as they can be written, before the run goes on."""
    patch.setattr(disk_writer, "SECONDS", 0.0)
    patch.setattr(disk_writer, "_SHARE", 0.0)
    wait_for_the_disk(patch)


def wait_for_the_disk(patch: pytest.MonkeyPatch) -> None:
    """Waits for each job in the background, so that a test can say what is on the disk."""
    add = Background.add
    patch.setattr(Background, "add", lambda self, job: (add(self, job), self.wait()))


def go_on(stream: Stream, directory: Path, parts: int) -> None:
    """Takes tokens from the stream until there are so many more parts."""
    end = count(directory) + parts
    for _ in stream:
        if count(directory) >= end:
            return


def count(directory: Path) -> int:
    journal = read_journal(directory)
    return len(journal.parts) if journal is not None else 0


class Recording:
    """Another process that records a run."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process

    def go_on(self, parts: int | None = None) -> int:
        """Lets it record more parts; all that are left for None. Returns how many there are."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{parts or ''}\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())


@contextmanager
def recording(directory: Path) -> Iterator[Recording]:
    command = [sys.executable, "-m", "tests.dashboard.growing_run", str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Recording(process)
        finally:
            process.kill()


if __name__ == "__main__":
    out = Path(sys.argv[1])
    part_each_round(pytest.MonkeyPatch())
    stream = begun(out)
    for line in sys.stdin:
        if line.strip():
            go_on(stream, out, int(line))
        else:
            list(stream)
        print(count(out), flush=True)
