"""Holds one model and runs cells on it, wherever that is: in this process, another, or a Ray actor."""

import errno
import os
import time
import traceback
from dataclasses import dataclass
from typing import Any

from cacheprobe.sweeps.cells import Cell
from cacheprobe.sweeps.storage.store import SweepStore


@dataclass(frozen=True)
class Job:
    """What every worker of a sweep is told."""

    url: str
    workers: int
    threads: int
    num_cpus: float
    num_gpus: float
    retries: int
    address: str | None = None
    """Of a Ray cluster; None for one of this machine's own."""


@dataclass(frozen=True)
class Outcome:
    """What became of a cell."""

    digest: str
    cause: str = ""
    """Empty where it was committed; else in a word or two, for counting."""
    message: str = ""
    trace: str = ""
    """Of the exception, for the event log."""
    seconds: float = 0.0
    """Of the run and the commit."""
    load_seconds: float = 0.0
    """Of loading the model, where it had to be."""
    size: int = 0
    """Bytes of the shard."""

    @property
    def is_committed(self) -> bool:
        return not self.cause


FULL = "no space left"
"""The cause after which a sweep stops handing out cells."""


class Holder:
    """Loads a model once, for as long as its cells come one after another."""

    def __init__(self, url: str) -> None:
        self.store = SweepStore(url)
        self._key: Any = None
        self._model: Any = None

    def run(self, held: dict[str, Any]) -> Outcome:
        """Run and commit the cell of this JSON. What goes wrong with it is in the outcome; it raises nothing of its own
        but what ends a process."""
        cell = Cell.from_json(held)
        digest, began, loaded = cell.digest, time.perf_counter(), 0.0
        if why := _other_code(cell):  # on another node, or since the sweep began
            return Outcome(digest, "another version", why)
        try:
            loaded = self._load(cell)
            from cacheprobe.sweeps.workers.work import run_cell, save_cell

            trace = run_cell(cell, self._model)
            size = self.store.commit(digest, lambda directory: save_cell(cell, trace, directory))
        except Exception as error:  # a cell's failure is a result: the others go on
            return Outcome(
                digest, cause_of(error), _first_line(error), traceback.format_exc(limit=-8), load_seconds=loaded
            )
        return Outcome(digest, seconds=time.perf_counter() - began - loaded, load_seconds=loaded, size=size)

    def _load(self, cell: Cell) -> float:
        if self._key == cell.model_key:
            return 0.0
        from cacheprobe.api import load_model

        began = time.perf_counter()
        self._key = self._model = None  # the old one goes before the new one comes
        name, dtype, adapter, products, device = cell.model_key
        self._model = load_model(name, dtype=dtype, device=device, adapter=adapter, products=products, progress=False)
        self._key = cell.model_key
        return time.perf_counter() - began


def _other_code(cell: Cell) -> str:
    """What is not as the cell's digest says; otherwise nothing."""
    from cacheprobe.sweeps.code import code_version, libraries

    here: dict[str, Any] = {"code": code_version(), **dict(libraries())}
    asked: dict[str, Any] = {"code": cell.origin["code"], **cell.origin["libraries"]}
    differ = [name for name in here if asked.get(name) != here[name]]
    said = "; ".join(f"{name} {asked.get(name)} is asked for and {here[name]} is here" for name in differ)
    return said and f"{said}: install what the sweep was begun with, or begin it again"


def cause_of(error: BaseException) -> str:
    """A failure's cause, for counting."""
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if is_full or os.strerror(errno.ENOSPC) in str(error):  # safetensors says it in words alone
        return FULL
    return type(error).__name__


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:500]
