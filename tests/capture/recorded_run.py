"""A run that is recorded to disk, in this process or in one that a test kills."""

import itertools
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

import cacheprobe as cp
from cacheprobe.engine.drafters.base import Drafter
from cacheprobe.lenses.dictionaries import Dictionary
from cacheprobe.trace.recording import disk_writer
from tests.dashboard.growing_run import wait_for_the_disk
from tests.dictionaries.planted import random_dictionary
from tests.models.heads.tiny_head import TinyHeadDrafter
from tests.planted_drafts import planted
from tests.tiny import PROMPTS, SMALL, loaded

LONG: dict[str, Any] = {**SMALL, "max_new_tokens": 12, "capacity": 128, "deterministic": [0, 1, 3], "seed": 5}
LONG["sampling"] = cp.SamplingParams(temperature=1.0)
DRAFTERS: dict[str, Callable[[], Drafter | None]] = {
    "none": lambda: None,
    "n-gram": cp.drafters.NGram,
    "early exit": lambda: cp.drafters.EarlyExit(layer=1),
    "head": TinyHeadDrafter,
}


def recorded(directory: Path, drafter: str, dictionary: "Dictionary | None" = None) -> cp.Trace:
    """Records the run, one part in each round."""
    disk_writer.SECONDS = disk_writer._SHARE = 0.0
    return cp.run(loaded(), PROMPTS, **LONG, drafter=DRAFTERS[drafter](), dictionary=dictionary, out=directory)


class Stopped(BaseException):
    """Stands for a kill: no handler of the program catches it."""


@contextmanager
def failing_after(files: int, error: BaseException | None = None) -> Iterator[None]:
    """The disk takes so many files of a run; the next write raises the error, by default Stopped, which leaves the
    `with` block and ends there."""
    write, count = disk_writer.RunFiles._write_whole, itertools.count()

    def fail(*given: Any) -> None:
        if next(count) >= files:
            raise error or Stopped
        write(*given)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(disk_writer.RunFiles, "_write_whole", fail)
        wait_for_the_disk(patched)  # else the number of files depends on the disk's speed
        if error is None:
            with pytest.raises(Stopped):
                yield
        else:
            yield


def recording_process(directory: Path, drafter: str, *, has_features: bool = False) -> ForkServerProcess:
    """Starts a process that records the run. It is forked from one that has imported the program already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    process = context.Process(target=_record, args=(directory, drafter, has_features))
    process.start()
    return process


def _record(directory: Path, drafter: str, has_features: bool) -> None:
    with planted(draft=0.0, verify=1e-9):  # as in the tests' own process
        recorded(directory, drafter, random_dictionary() if has_features else None)
