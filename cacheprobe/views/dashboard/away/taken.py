"""Defines what is taken away of a view, what it is made from, and the lines of Python that open a run."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from cacheprobe.views.dashboard.book import Book
from cacheprobe.views.dashboard.flip_jobs import FlipJobs
from cacheprobe.views.dashboard.reader import RECORDED, RunReader
from cacheprobe.views.dashboard.shelf import Shelf


class Sources(NamedTuple):
    """Holds what the views of one dashboard are made from."""

    shelf: Shelf
    reader: RunReader
    jobs: FlipJobs


class Taken(NamedTuple):
    """Holds a view as a table and as code."""

    table: Callable[[], pd.DataFrame]
    """Returns the table that the view shows."""
    code: Sequence[str]
    """Lines of Python. They name that table `table`, and the last of them makes the picture, if the view has one."""


def opened(book: Book, name: str = "trace") -> list[str]:
    """Returns the lines of Python that open a run without its model. name: of the variable."""
    return ["import cacheprobe as cp", "", f"{name} = cp.load_trace({directory_of(book)!r})"]


def opened_with_model(shelf: Shelf, book: Book) -> list[str]:
    """Returns the lines of Python that open a run with its model."""
    fingerprint = book.run.fingerprint
    adapter = f", adapter={fingerprint['adapter']!r}" if fingerprint.get("adapter") else ""
    name, dtype, device = shelf.model or fingerprint["model"], fingerprint["dtype"], fingerprint["device"]
    return [
        "import cacheprobe as cp",
        "",
        f"model = cp.load_model({name!r}, dtype={dtype!r}, device={device!r}{adapter})",
        f"trace = cp.load_trace({directory_of(book)!r}, model)",
    ]


def opened_for(shelf: Shelf, book: Book, lens: object) -> list[str]:
    """Returns the lines of Python that open a run to show readings through a lens of the page's menu: with the run's
    model, unless the readings are recorded."""
    return opened(book) if lens == RECORDED else opened_with_model(shelf, book)


def lens_code(shelf: Shelf, lens: object) -> str:
    """Returns the Python expression of a lens of the page's menu that reads states now."""
    kind, _, number = str(lens).partition(":")
    if kind == "tuned":
        return f"cp.lenses.TunedLens.load({str(shelf.lenses[int(number)].absolute())!r}, model)"
    return "cp.lenses.LogitLens()"


def directory_of(book: Book) -> str:
    """Returns the absolute path of a run's directory as text."""
    return str(Path(book.run.directory).absolute())
