"""Runs cells on one loaded model: in this process, in a worker process, or in a Ray actor."""

import errno
import os
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cacheprobe.core.values import JsonDict
from cacheprobe.sweeps.cells import Cell, ModelKey
from cacheprobe.sweeps.storage.store import SweepStore

if TYPE_CHECKING:
    from cacheprobe.models.base import CachedLM


@dataclass(frozen=True)
class Job:
    """Holds the settings that every worker of a sweep needs: place of the results, resources, retries."""

    url: str
    workers: int
    threads: int
    num_cpus: float
    num_gpus: float
    retries: int
    address: str | None = None
    """Address of a Ray cluster; None to start one on this machine."""


@dataclass(frozen=True)
class JobOutcome:
    """Holds the result of one cell (run) of a sweep: committed, or the cause of the failure."""

    digest: str
    cause: str = ""
    """'' if the cell was committed; otherwise the cause of the failure in a few words, for counting."""
    message: str = ""
    trace: str = ""
    """Traceback of the exception, for the event log."""
    seconds: float = 0.0
    """Seconds of the run and the commit."""
    load_seconds: float = 0.0
    """Seconds of loading the model; 0 if the model was loaded already."""
    size: int = 0
    """Size of the shard in bytes."""

    @property
    def is_committed(self) -> bool:
        """Whether the cell was committed."""
        return not self.cause


FULL = "no space left"
"""Cause of a failure on a full disk, after which a sweep starts no more cells."""


class Holder:
    """Runs and commits cells (runs). Keeps one model loaded, and loads another when a cell needs another."""

    def __init__(self, url: str) -> None:
        self.store = SweepStore(url)
        self._key: ModelKey | None = None
        self._model: CachedLM | None = None

    def run(self, stored: JsonDict) -> JobOutcome:
        """Runs a cell, given as `Cell.to_json`, and commits its shard (saved run); returns the JobOutcome.

        An Exception is reported in the JobOutcome, not raised. A cell planned with other versions of code or libraries
        is not run.
        """
        cell = Cell.from_json(stored)
        digest, began, load_seconds = cell.digest, time.perf_counter(), 0.0
        if why := _version_difference(cell):  # on another node, or since the sweep began
            return JobOutcome(digest, "another version", why)
        try:
            load_seconds = self._load(cell)
            from cacheprobe.sweeps.workers.work import run_cell, save_cell

            assert self._model is not None
            trace = run_cell(cell, self._model)
            size = self.store.commit(digest, lambda directory: save_cell(cell, trace, directory))
        except Exception as error:  # a cell's failure is a result: the others go on
            return JobOutcome(
                digest, cause_of(error), _first_line(error), traceback.format_exc(limit=-8), load_seconds=load_seconds
            )
        seconds = time.perf_counter() - began - load_seconds
        return JobOutcome(digest, seconds=seconds, load_seconds=load_seconds, size=size)

    def _load(self, cell: Cell) -> float:
        """Loads the cell's model, if another model or none is loaded; returns the seconds, 0 without loading."""
        if self._key == cell.model_key:
            return 0.0
        from cacheprobe.api import load_model

        began = time.perf_counter()
        self._key = self._model = None  # frees the old model before the new one is loaded
        name, dtype, adapter, products, device = cell.model_key
        self._model = load_model(name, dtype=dtype, device=device, adapter=adapter, products=products, progress=False)
        self._key = cell.model_key
        return time.perf_counter() - began


def _version_difference(cell: Cell) -> str:
    """Returns text: how code or libraries differ from those with which the cell was planned; '' if all are equal."""
    from cacheprobe.sweeps.code import code_version, libraries

    installed = {"code": code_version(), **dict(libraries())}
    planned: dict[str, str] = {"code": cell.origin["code"], **cell.origin["libraries"]}
    differ = [name for name in installed if planned.get(name) != installed[name]]
    listed = "; ".join(f"{name} {planned.get(name)} is asked for and {installed[name]} is here" for name in differ)
    return listed and f"{listed}: install what the sweep was begun with, or begin it again"


def cause_of(error: BaseException) -> str:
    """Returns the cause of a failure as a short text, for counting: FULL for a full disk, else the class name."""
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if is_full or os.strerror(errno.ENOSPC) in str(error):  # safetensors reports a full disk only in the message
        return FULL
    return type(error).__name__


def _first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, up to 500 characters; without a message, the class name."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:500]
