"""Tables and code of stored results."""

from pathlib import Path

import pandas as pd

from cacheprobe.views.dashboard.away.taken import Sources, Taken
from cacheprobe.views.dashboard.questions import CannotShow, PageQuestion, whole
from cacheprobe.views.dashboard.tabs.results import (
    PROBE,
    SURGERY,
    StoredTable,
    chosen_table,
    column_to_draw,
    kind_of,
    loaded,
    stored_tables,
)
from cacheprobe.views.dashboard.tabs.sweep import is_sweep, sweep_page
from cacheprobe.views.dashboard.tabs.tables import selected_lines, selecting_code
from cacheprobe.views.grids import ESTIMATED_AND_REAL

_IS_RECORDS = "isinstance(value, list) and value and all(isinstance(line, dict) for line in value)"


def result(sources: Sources, question: PageQuestion) -> Taken:
    """Takes the table that is shown of a result file, as it is sorted and filtered; all its lines."""
    shelf = sources.shelf
    path = shelf.results[whole(question["result"], "result", len(shelf.results))].absolute()
    content = loaded(path)
    if is_sweep(content):
        return _sweep(path.parent, question)
    tables = stored_tables(path, content)
    if not tables:
        raise CannotShow(f"{path.name} holds nothing that can be shown as a table")
    stored = tables[chosen_table(tables, question)]
    lines = selected_lines(stored.table, question)
    begin, last = _table_code(path, stored, content), _picture(kind_of(path), stored, lines, question)
    return Taken(lambda: lines, [*begin, *selecting_code(stored.table, question), last])


def _table_code(path: Path, stored: StoredTable, content: object) -> list[str]:
    """Returns the lines of Python that read a table of a result file."""
    if kind_of(path) == "patching":
        return [
            "import cacheprobe as cp",
            "",
            f"grid = cp.patching.PatchingGrid.load({str(path)!r})",
            "table = grid.table",
        ]
    begin = ["import json", "from pathlib import Path", "", "import pandas as pd", "", "import cacheprobe as cp", ""]
    begin += [f'content = json.loads(Path({str(path)!r}).read_text(encoding="utf-8"))']
    if not stored.is_values:
        keys = "".join(f"[{key!r}]" for key in stored.keys)
        return [*begin, f"whole = table = pd.DataFrame(content{keys})"]
    if not isinstance(content, dict):
        return [*begin, "table = pd.DataFrame({'figure': [''], 'value': [content]}, dtype=object)"]
    return [
        *begin,
        "values = pd.json_normalize(content, sep=' · ').astype(object).iloc[0]",
        f"is_list_of_records = values.map(lambda value: bool({_IS_RECORDS}))",
        "table = values[~is_list_of_records].rename_axis('figure').rename('value').reset_index()",
    ]


def _picture(kind: str, stored: StoredTable, lines: pd.DataFrame, question: PageQuestion) -> str:
    """Returns the line of Python that makes the picture of a result; that shows the table, if it has none."""
    if kind == "patching":
        has_both = set(ESTIMATED_AND_REAL) <= set(stored.table.columns)
        return f"cp.plots.{'attribution_patching_grid' if has_both else 'patching_grid'}(grid)"
    if kind == "probes" and PROBE <= set(stored.table.columns):
        return "cp.plots.probe_figure(whole)"
    if kind == "surgery" and SURGERY <= set(stored.table.columns):
        return "[cp.plots.coin_rows_figure(whole, unit=unit).show() for unit in whole.unit.unique()]"
    column = column_to_draw(lines, question)
    return "table" if column is None else f"cp.plots.column_figure(table, {column!r})"


def _sweep(folder: Path, question: PageQuestion) -> Taken:
    """Takes the cells of a sweep that the page shows."""
    page = sweep_page(folder, question)
    lines = selected_lines(page.cells, question)
    code = ["import cacheprobe as cp", "", f"sweep = cp.load_sweep({str(folder)!r})", "cells = sweep.cells"]
    code += ["layers = sweep.layers"] if page.pair else []
    for name in page.pages:
        values = page.shown(name)
        if len(values) < len(page.varied[name]):
            for table in ("cells", "layers"):
                column = f'{table}[{name!r}].astype(object).where({table}[{name!r}].notna(), "none")'
                code += [f"{table} = {table}[{column}.isin({values!r})]"]
    code += [f"table = cells[{list(page.cells.columns)!r}]", *selecting_code(page.cells, question)]
    code += [f"cp.plots.sweep_grid(layers, {', '.join(map(repr, page.pages))})" if page.pair else "table"]
    return Taken(lambda: lines, code)
