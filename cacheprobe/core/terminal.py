"""Prints small tables: drawn by rich on a terminal, as plain aligned lines otherwise."""

import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

DASH_PORT = 8050
"""Port at which `cacheprobe dash` listens by default. It prints its address."""


class Listing(NamedTuple):
    """Holds a small table for a terminal: a title, columns, lines of text cells, and a note. No text in it may have a
    line break, a tab or another control character; `visible` of core/tokens/text.py writes those as signs."""

    title: str
    columns: tuple[str, ...]
    """Names of the columns; () if every line is a name and a value."""
    rows: Sequence[tuple[str, ...]]
    note: str = ""
    """Text printed below the lines, or in their place if there are none."""


def show(listings: Iterable[Listing]) -> None:
    """Prints the listings on stdout: drawn by rich on a terminal, else as plain lines with aligned columns."""
    draw = _draw if sys.stdout.isatty() else _write
    for listing in listings:
        draw(listing)


def lines(listing: Listing) -> list[str]:
    """Returns a listing as a list of plain text lines with aligned columns."""
    table = [listing.columns, *listing.rows] if listing.columns and listing.rows else list(listing.rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    aligned = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return [listing.title, *(f"  {line}" for line in aligned), *([f"  {listing.note}"] if listing.note else [])]


def duration(seconds: float) -> str:
    """Returns a number of seconds as text in a suitable unit: "1.2 s", "12 s", "3.5 min" or "2.1 h"."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _write(listing: Listing) -> None:
    print("\n".join(lines(listing)), end="\n\n")


def _draw(listing: Listing) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, markup=False)
    table = Table(title=Text(listing.title, "bold"), title_justify="left", show_header=bool(listing.columns))
    for number, name in enumerate(listing.columns or ("", "")):
        table.add_column(Text(name), style=None if listing.columns or number else "bold", overflow="fold")
    for row in listing.rows:
        table.add_row(*map(Text, row))
    if listing.rows:
        console.print(table)
    else:
        console.print(Text(listing.title, "bold"))
    if listing.note:
        console.print(listing.note)
    console.print()
