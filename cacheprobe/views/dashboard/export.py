"""Writes a view's table as CSV, and the lines of Python that open a run for a view's code."""

from io import BytesIO
from pathlib import Path

import pandas as pd

from cacheprobe.core.export import write_csv
from cacheprobe.views.dashboard.reader import RECORDED
from cacheprobe.views.dashboard.run_list import RunList
from cacheprobe.views.dashboard.run_tables import RunTables

WAYS = {
    "link": ("copy link", "copy the address of what is shown"),
    "svg": ("SVG", "save this view as a vector graphic"),
    "png": ("PNG", "save this view as an image"),
    "csv": ("CSV", "save the table of this view"),
    "code": ("code", "show the Python code that makes this view in a notebook"),
}
"""By way to export a view: the button's name and hover text. assets/exports.js makes the buttons."""
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""First letters of a cell that a spreadsheet would compute."""


def csv_text(table: pd.DataFrame) -> str:
    """Returns a table as CSV, as `write_csv` writes it: a head, and one line for each line of the table. A text that
    begins like a formula gets an apostrophe before it, so that a spreadsheet shows it as text."""
    file = BytesIO()
    write_csv(table.map(_cell).rename(columns=_cell), file)
    return file.getvalue().decode()


def _cell(value: object) -> object:
    """Returns a value as it is written to a cell."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def opened(tables: RunTables, name: str = "trace") -> list[str]:
    """Returns the lines of Python that open a run without its model. name: of the variable."""
    return ["import cacheprobe as cp", "", f"{name} = cp.load_trace({directory_of(tables)!r})"]


def opened_with_model(run_list: RunList, tables: RunTables) -> list[str]:
    """Returns the lines of Python that open a run with its model."""
    fingerprint = tables.run.fingerprint
    adapter = f", adapter={fingerprint['adapter']!r}" if fingerprint.get("adapter") else ""
    name, dtype, device = run_list.model or fingerprint["model"], fingerprint["dtype"], fingerprint["device"]
    return [
        "import cacheprobe as cp",
        "",
        f"model = cp.load_model({name!r}, dtype={dtype!r}, device={device!r}{adapter})",
        f"trace = cp.load_trace({directory_of(tables)!r}, model)",
    ]


def readings_code(
    run_list: RunList, tables: RunTables, lens: object, site: str, request: int, chosen: str
) -> list[str]:
    """Returns the lines of Python that open a run and name some of its lens readings `table`; the recorded ones of all
    requests are named `readings`. lens: of the page's menu.  chosen: condition on the request's rows, such as
    "row == 5"."""
    if lens == RECORDED:
        return [
            *opened(tables),
            "readings = cp.analysis.lens_readings(trace, include_rolled_back=True)",
            f"table = readings.query({f'request_id == {request} and {chosen}'!r})",
        ]
    kind, _, number = str(lens).partition(":")
    reads = "cp.lenses.LogitLens()"
    if kind == "tuned":
        reads = f"cp.lenses.TunedLens.load({str(run_list.lenses[int(number)].absolute())!r}, model)"
    return [
        *opened_with_model(run_list, tables),
        f"rows = trace.rows({request}).query({f'{chosen} and state_index >= 0'!r})",
        f"table = readings = cp.analysis.read_states(trace, {reads}, {site!r}, rows=rows)",
    ]


def directory_of(tables: RunTables) -> str:
    """Returns the absolute path of a run's directory as text."""
    return str(Path(tables.run.directory).absolute())
