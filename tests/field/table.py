"""Measures many families, in a process that may crash, and writes the table of docs/families.txt."""

import multiprocessing
import os
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection

import torch

from cacheprobe.core.terminal import Progress
from cacheprobe.core.values import hint
from tests.field.rows import LOADS, Row, measure
from tests.field.tiny_family import families
from tests.field.variants import VARIANTS

SECONDS_PER_FAMILY = 120.0
"""A family that takes longer is stopped, and its row says so."""


def names_to_measure(chosen: Sequence[str] = ()) -> list[str]:
    """Returns the chosen names; by default all families and all variants. Raises: ValueError for an unknown name."""
    known = [*families(), *VARIANTS]
    for name in chosen:
        if name not in known:
            raise ValueError(f"unknown family {name!r}; choose from transformers' model types{hint(name, known)}")
    return list(chosen) or known


def measure_all(names: Sequence[str], *, progress: bool = True) -> list[Row]:
    """Returns the Row of each name, measured in a worker process. A crash or a hang costs one row: the next name begins
    in a new process."""
    rows: list[Row] = []
    with Progress(len(names), "measuring families", "families", enabled=progress) as bar:
        while len(rows) < len(names):
            for row in _measured(names[len(rows) :]):
                rows.append(row)
                bar.advance(note=row.name)
    return rows


def _measured(names: Sequence[str]) -> Iterator[Row]:
    """Yields the rows of one worker process, up to the first name at which it crashes or hangs."""
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    worker = context.Process(target=measure_in_worker, args=(list(names), sending), daemon=True)
    worker.start()
    sending.close()  # so that the end of the worker ends the pipe
    try:
        for name in names:
            what = f"it took over {SECONDS_PER_FAMILY:.0f} s"
            if receiving.poll(SECONDS_PER_FAMILY):
                try:
                    yield receiving.recv()
                    continue
                except EOFError:
                    what = "its process ended"
            family = VARIANTS[name].family if name in VARIANTS else name
            yield Row(name, families()[family], {LOADS: False}, reasons=[what], is_crash=True)
            return
    finally:
        worker.kill()
        worker.join()


def measure_in_worker(names: list[str], rows: Connection) -> None:
    """Sends the Row of each name, as soon as it is measured."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    os.dup2(2, 1)  # what a library prints is no row
    for name in names:
        rows.send(measure(name))


def counts(rows: Sequence[Row]) -> str:
    """Returns a sentence: how many rows pass all columns, are refused, and fail a column."""
    green, refused = sum(row.is_green for row in rows), sum(row.is_refused for row in rows)
    crashed = sum(row.is_crash for row in rows)
    failed = len(rows) - green - refused - crashed
    said = f"{green} of {len(rows)} pass all columns, {refused} are refused, {failed} fail a column"
    return f"{said}, {crashed} crashed" if crashed else said


def markdown(rows: Sequence[Row]) -> str:
    """Returns the table of docs/families.txt: the columns that each family passes, and the reason if it does not pass
    all."""
    header = ["| family | passes | reason |", "|---|---|---|"]
    return "\n".join([*header, *map(markdown_line, rows)])


def markdown_line(row: Row) -> str:
    """Returns one line of the table of docs/families.txt."""
    failing = [name for name, passes in row.cells.items() if not passes]
    passes = f"all but {', '.join(failing)}" if failing else "all"
    if row.is_refused or row.is_crash:
        passes = f"none, {'crashed' if row.is_crash else 'refused'}"
    has_none = passes.startswith("none")
    reason = "" if row.is_green else next((one for one in row.reasons if has_none or ":" in one), "")
    return f"| {row.name} | {passes} | {reason.replace('|', ' ')} |"
