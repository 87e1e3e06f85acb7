"""Holds one model and runs cells on it: in this process, in another, or in a Ray actor."""

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
    """Settings that every worker of a sweep needs."""

    url: str
    workers: int
    threads: int
    num_cpus: float
    num_gpus: float
    retries: int
    address: str | None = None
    """Address of a Ray cluster; None to start one on this machine."""


@dataclass(frozen=True)
class Outcome:
    """Result of one cell."""

    digest: str
    cause: str = ""
    """'' if the cell was committed; else the cause in a word or two, for counting."""
    message: str = ""
    trace: str = ""
    """Traceback of the exception, for the event log."""
    seconds: float = 0.0
    """Seconds of the run and the commit."""
    load_seconds: float = 0.0
    """Seconds of loading the model; 0 if it was loaded already."""
    size: int = 0
    """Bytes of the shard."""

    @property
    def is_committed(self) -> bool:
        """Whether the cell was committed."""
        return not self.cause


FULL = "no space left"
"""Cause after which a sweep starts no more cells."""


class Holder:
    """Keeps one model loaded while cells of this model follow each other."""

    def __init__(self, url: str) -> None:
        self.store = SweepStore(url)
        self._key: ModelKey | None = None
        self._model: CachedLM | None = None

    def run(self, held: JsonDict) -> Outcome:
        """Runs and commits the cell of this JSON. An error of the cell is in the outcome and is not raised."""
        cell = Cell.from_json(held)
        digest, began, loaded = cell.digest, time.perf_counter(), 0.0
        if why := _other_code(cell):  # on another node, or since the sweep began
            return Outcome(digest, "another version", why)
        try:
            loaded = self._load(cell)
            from cacheprobe.sweeps.workers.work import run_cell, save_cell

            assert self._model is not None
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
        self._key = self._model = None  # frees the old model before the new one is loaded
        name, dtype, adapter, products, device = cell.model_key
        self._model = load_model(name, dtype=dtype, device=device, adapter=adapter, products=products, progress=False)
        self._key = cell.model_key
        return time.perf_counter() - began


def _other_code(cell: Cell) -> str:
    """Returns how code or libraries differ from those that the cell was planned with; '' if they are equal."""
    from cacheprobe.sweeps.code import code_version, libraries

    here = {"code": code_version(), **dict(libraries())}
    asked: dict[str, str] = {"code": cell.origin["code"], **cell.origin["libraries"]}
    differ = [name for name in here if asked.get(name) != here[name]]
    said = "; ".join(f"{name} {asked.get(name)} is asked for and {here[name]} is here" for name in differ)
    return said and f"{said}: install what the sweep was begun with, or begin it again"


def cause_of(error: BaseException) -> str:
    """Returns a failure's cause, for counting."""
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if is_full or os.strerror(errno.ENOSPC) in str(error):  # safetensors says it in words alone
        return FULL
    return type(error).__name__


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:500]
