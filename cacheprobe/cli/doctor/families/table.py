"""Measures many families in worker processes, and shows the table for a terminal, as JSON or as Markdown."""

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Sequence

from cacheprobe.cli.doctor.families.columns import COLUMNS
from cacheprobe.cli.doctor.families.rows import LOADS, Row
from cacheprobe.cli.doctor.families.tiny import families
from cacheprobe.cli.doctor.families.variants import VARIANTS
from cacheprobe.core.terminal import Listing, Progress
from cacheprobe.core.values import hint

SECONDS_PER_FAMILY = 120.0
"""A family that takes longer is stopped, and its row says so."""

_COLUMNS = (LOADS, *COLUMNS)


def names_to_measure(chosen: str = "") -> list[str]:
    """Returns the names of `chosen`, separated by commas; by default all families and all variants.

    Raises: ValueError for an unknown name.
    """
    known = [*families(), *VARIANTS]
    if not chosen.strip():
        return known
    names = [one.strip() for one in chosen.split(",") if one.strip()]
    if not names:
        raise ValueError(f"--families={chosen!r} names no family; give some such as llama,qwen3")
    for name in names:
        if name not in known:
            raise ValueError(f"unknown family {name!r}; choose from transformers' model types{hint(name, known)}")
    return names


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
    command = [sys.executable, "-m", "cacheprobe.cli.doctor.families.worker", json.dumps(list(names))]
    done = 0
    # without a buffer, what was written and not yet read is in the pipe, where select sees it
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=_environment(), bufsize=0
    ) as worker:
        assert worker.stdout is not None
        while done < len(names):
            is_ready = select.select([worker.stdout], [], [], SECONDS_PER_FAMILY)[0]
            line = worker.stdout.readline() if is_ready else b""
            if not line.startswith(b"{"):
                worker.kill()
                name = names[done]
                family = VARIANTS[name].family if name in VARIANTS else name
                what = "its process ended" if is_ready else f"it took over {SECONDS_PER_FAMILY:.0f} s"
                yield Row(name, families()[family], {LOADS: False}, reasons=[what], is_crash=True)
                return
            done += 1
            yield Row.from_json(json.loads(line))


def _environment() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def counts(rows: Sequence[Row]) -> str:
    """Returns a sentence: how many rows pass all columns, are refused, and fail a column."""
    green, refused = sum(row.is_green for row in rows), sum(row.is_refused for row in rows)
    crashed = sum(row.is_crash for row in rows)
    failed = len(rows) - green - refused - crashed
    return (
        f"{green} of {len(rows)} pass all columns, {refused} are refused, {failed} fail a column"
        f"{f', {crashed} crashed' * bool(crashed)}"
    )


def listings(rows: Sequence[Row]) -> list[Listing]:
    """Returns the tables to print: families that run, refused families with the reason, and variants."""
    of_families = [row for row in rows if row.name not in VARIANTS]
    of_variants = [row for row in rows if row.name in VARIANTS]
    run = [row for row in of_families if not row.is_refused]
    refused = [row for row in of_families if row.is_refused]
    columns = ("family", *_COLUMNS, "path", "reason")
    tables = [
        Listing("families that run", columns, [_cells(row) for row in run], counts(of_families)),
        Listing("refused families", ("family", "reason"), [(row.name, _reason(row)) for row in refused]),
        Listing("variants", columns, [_cells(row) for row in of_variants]),
    ]
    return [table for table in tables if table.rows]


def _cells(row: Row) -> tuple[str, ...]:
    marks = ["-" if name not in row.cells else "yes" if row.cells[name] else "NO" for name in _COLUMNS]
    return (row.name, *marks, row.path or "-", _reason(row))


def _reason(row: Row) -> str:
    return "; ".join(row.reasons)


def markdown(rows: Sequence[Row]) -> str:
    """Returns the table of docs/families.txt: each family's path, the columns that it passes, and the reason if it does
    not pass all."""
    header = ["| family | path | passes | reason |", "|---|---|---|---|"]
    return "\n".join([*header, *map(markdown_line, rows)])


def markdown_line(row: Row) -> str:
    """Returns one line of the table of docs/families.txt."""
    failing = [name for name, passes in row.cells.items() if not passes]
    passes = f"all but {', '.join(failing)}" if failing else "all"
    if row.is_refused or row.is_crash:
        passes = f"none, {'crashed' if row.is_crash else 'refused'}"
    has_none = passes.startswith("none")
    reason = "" if row.is_green else next((one for one in row.reasons if has_none or ":" in one), "")
    return f"| {row.name} | {row.path or '-'} | {passes} | {reason.replace('|', ' ')} |"
