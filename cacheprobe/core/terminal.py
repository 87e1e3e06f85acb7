"""Listings: small tables for a terminal, which are plain lines where the output goes elsewhere."""

import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Listing(NamedTuple):
    """A title over rows of text. Texts from a run are made visible by whoever makes the listing."""

    title: str
    columns: tuple[str, ...]
    """() for rows of a name and a value."""
    rows: Sequence[tuple[str, ...]]
    note: str = ""
    """Stands instead of the rows where there are none, and below them otherwise."""


def show(listings: Iterable[Listing]) -> None:
    """Print them on stdout: drawn by rich on a terminal, else a line for each row with its columns aligned."""
    draw = _draw if sys.stdout.isatty() else _write
    for listing in listings:
        draw(listing)


def lines(listing: Listing) -> list[str]:
    """The listing as plain lines."""
    table = [listing.columns, *listing.rows] if listing.columns and listing.rows else list(listing.rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    told = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return [listing.title, *(f"  {line}" for line in told), *([f"  {listing.note}"] if listing.note else [])]


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
