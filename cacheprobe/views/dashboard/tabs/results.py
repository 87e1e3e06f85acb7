"""Shows stored result files: figures by kind (patching grids, cache surgery, probes, sweeps, any column of numbers),
and tables that can be sorted and filtered."""

import json
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pandas as pd

from cacheprobe.core.values import JsonDict
from cacheprobe.views.curves import column_figure, columns_to_draw
from cacheprobe.views.dashboard.questions import CannotShow, PageAnswer, PageQuestion, whole
from cacheprobe.views.dashboard.run_list import RunList
from cacheprobe.views.dashboard.tabs.sweep import SweepCells, is_sweep
from cacheprobe.views.dashboard.tabs.tables import ordered_column, selected_lines, selecting_code, sortable
from cacheprobe.views.dashboard.view import View, button
from cacheprobe.views.findings import coin_rows_figure
from cacheprobe.views.grids import ESTIMATED_AND_REAL, attribution_patching_grid, patching_grid
from cacheprobe.views.probes import probe_figure
from cacheprobe.views.style import Figure
from cacheprobe.views.text import markup

if TYPE_CHECKING:
    from cacheprobe.edits.patching.grid import PatchingGrid

MOST_BYTES = 20 * 2**20
MOST_FIGURES = 6
_REMEDY = "name a folder of them: cacheprobe dash RUN analyses/results"
KINDS = (
    ("patching", "Patching", 'no patching grid was named; keep one with grid.save("grid.json") and name that file'),
    ("surgery", "Cache surgery", f"no result of cache surgery was named; {_REMEDY}"),
    ("probes", "Probes", f"no result of a probe was named; {_REMEDY}"),
    ("sweep", "Sweep", "no sweep was named; run one (cacheprobe sweep data/sweeps/coin-flip.yaml) and name its folder"),
    ("results", "Results", f"no other results were named; {_REMEDY}"),
)
"""Each kind of result: its key, the name of its tab, and what is said to who asks for the tab without a result."""
_COLUMN_NOTE = "the figure shows the column of numbers that the table is sorted by, else the first one."
PROBE = {"at", "place", "site", "layer", "accuracy", "low", "high", "is_above", "untrained", "embedding", "majority"}
SURGERY = {"people", "unit", "where", "treatment", "n", "total", "flips"}


class StoredTable(NamedTuple):
    """Holds one table of a result file."""

    keys: tuple[str, ...]
    """Path of keys to it in the file's JSON."""
    table: pd.DataFrame
    is_values: bool = False
    """Whether it has the values outside of lists: columns figure (path of keys) and value."""

    @property
    def name(self) -> str:
        """Path of keys as text."""
        return " · ".join(self.keys) or ("values" if self.is_values else "lines")


def result_view(run_list: RunList, question: PageQuestion) -> View:
    """Returns the view of the result that a question names: `SweepCells` or `ResultFile`."""
    path = run_list.results[whole(question["result"], "result", len(run_list.results))].absolute()
    content = loaded(path)
    if is_sweep(content):
        return SweepCells(run_list, question, path.parent)
    return ResultFile(run_list, question, path, content)


class ResultFile(View):
    """A result file: its figures, and one of its tables, which can be sorted and filtered. For a file of a kind without
    figures of its own, the figure is of one column: the one that sorts the table."""

    def __init__(self, run_list: RunList, question: PageQuestion, path: Path, content: object) -> None:
        super().__init__(run_list, question)
        self.path, self.content = path, content

    @cached_property
    def stored(self) -> list[StoredTable]:
        """Tables of the file: its lists of records, then its other values. Of a patching grid, the grid's table."""
        if _is_grid(self.content):
            return [StoredTable(("cells",), _grid(self.path).table)]
        tables = [StoredTable(keys, pd.DataFrame(lines)) for keys, lines in _record_lists(self.content)]
        if values := list(_plain_values(self.content)):
            frame = pd.DataFrame({"figure": [name for name, _ in values], "value": [value for _, value in values]})
            tables.append(StoredTable((), frame.astype(object), is_values=True))
        return tables

    @property
    def index(self) -> int:
        """Number of the table that the question names: the first if it names none, or one that is not there."""
        wanted = self.question.get("table")
        return wanted if isinstance(wanted, int) and 0 <= wanted < len(self.stored) else 0

    @cached_property
    def chosen(self) -> StoredTable:
        """Table that the question names. Raises: CannotShow for a file without tables."""
        if not self.stored:
            raise CannotShow(f"{self.path.name} holds nothing that can be shown as a table")
        return self.stored[self.index]

    def table(self) -> pd.DataFrame:
        """Returns all lines of the chosen table, as it is sorted and filtered."""
        return selected_lines(self.chosen.table, self.question)

    @property
    def column(self) -> str | None:
        """Column of the table that its figure draws: the one that sorts it, if that has numbers, else the first that
        can be drawn. None if there is none."""
        table = self.table()
        known = [name for name in columns_to_draw(table) if table[name].notna().any()]
        ordered = ordered_column(table, self.question)
        return ordered if ordered in known else next(iter(known), None)

    def draw(self) -> str | PageAnswer:
        """Returns the figures, the chosen table, and a button for each table of the file."""
        if not self.stored:
            note = "This file holds nothing that can be shown as a table."
            return f"<h2>{markup(self.path.stem)}</h2><p class='note'>{note}</p>"
        lines, (figures, note) = self.table(), figures_of(self.path, self.content)
        if not figures and self.column is not None:
            figures, note = [column_figure(lines, self.column)], markup(f"{self.path.name}: {_COLUMN_NOTE}")
        more = f"{self._chooser()}{sortable(lines, len(self.chosen.table), self.question)}"
        if not figures:
            return {"html": f"<h2>{markup(self.path.stem)}</h2>", "more": more}
        html = f"<h2>{figures[0].layout.title.text}</h2><p class='note'>{note}</p>"
        return {"html": html, "graphs": self.graphs("result", figures), "more": more}

    def _chooser(self) -> str:
        """Returns HTML: a button for each table of the file; the name alone if there is one."""
        if len(self.stored) == 1:
            return f"<h3>{markup(self.chosen.name)}</h3>"
        tables = enumerate(self.stored)
        buttons = [button(one.name, i == self.index, intent="table", table=i) for i, one in tables]
        return f'<div class="verdicts">{"".join(buttons)}</div>'

    def code(self) -> list[str]:
        """Returns the code of the chosen table and of its figure."""
        columns, kind = set(self.chosen.table.columns), kind_of(self.path)
        select = selecting_code(self.chosen.table, self.question)
        if kind == "patching":
            draw = "attribution_patching_grid" if set(ESTIMATED_AND_REAL) <= columns else "patching_grid"
            grid = f"grid = cp.patching.PatchingGrid.load({str(self.path)!r})"
            return ["import cacheprobe as cp", "", grid, "table = grid.table", *select, f"cp.plots.{draw}(grid)"]
        begin = ["import json", "from pathlib import Path", ""]
        begin += ["import pandas as pd", "", "import cacheprobe as cp", ""]
        begin += [f'content = json.loads(Path({str(self.path)!r}).read_text(encoding="utf-8"))', *self._reading_code()]
        if kind == "probes" and columns >= PROBE:
            last = "cp.plots.probe_figure(whole)"
        elif kind == "surgery" and columns >= SURGERY:
            last = "[cp.plots.coin_rows_figure(whole, unit=unit).show() for unit in whole.unit.unique()]"
        else:
            last = "table" if self.column is None else f"cp.plots.column_figure(table, {self.column!r})"
        return [*begin, *select, last]

    def _reading_code(self) -> list[str]:
        """Returns the lines of Python that take the chosen table from the content of the file."""
        if not self.chosen.is_values:
            keys = "".join(f"[{key!r}]" for key in self.chosen.keys)
            return [f"whole = table = pd.DataFrame(content{keys})"]
        if not isinstance(self.content, dict):
            return ["table = pd.DataFrame({'figure': [''], 'value': [content]}, dtype=object)"]
        is_records = "isinstance(value, list) and value and all(isinstance(line, dict) for line in value)"
        return [
            "values = pd.json_normalize(content, sep=' · ').astype(object).iloc[0]",
            f"is_list_of_records = values.map(lambda value: bool({is_records}))",
            "table = values[~is_list_of_records].rename_axis('figure').rename('value').reset_index()",
        ]


def kind_of(path: Path) -> str:
    """Returns the kind of a result file by its content: "patching", "sweep", "surgery", "probes" or "results". An
    unreadable file is of the kind "results", whose tab shows the error."""
    try:
        content = loaded(path)
    except (CannotShow, OSError):
        return "results"
    if _is_grid(content):
        return "patching"
    if is_sweep(content):
        return "sweep"
    if _lists_with(content, SURGERY):
        return "surgery"
    return "probes" if _lists_with(content, PROBE) else "results"


def loaded(path: Path) -> object:
    """Returns the content of a JSON file; the callers do not change it. Raises: CannotShow for a file that is too large
    or not JSON."""
    about = path.stat()
    if about.st_size > MOST_BYTES:
        raise CannotShow(f"{path.name} has {about.st_size} bytes, at most {MOST_BYTES} are shown")
    return _parsed(path, about.st_mtime_ns)


@lru_cache(maxsize=8)
def _parsed(path: Path, _changed: int) -> object:
    """Returns the content of a JSON file. _changed: when the file was changed; a changed file is read again."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CannotShow(f"{path.name} is not readable as JSON ({error!s:.120})") from error


def figures_of(path: Path, content: object) -> tuple[Sequence[Figure], str]:
    """Returns (plotly figures, note on their source as escaped text) of a result file; ([], "") without figures of its
    kind."""
    if _is_grid(content):
        grid = _grid(path)
        has_both = set(ESTIMATED_AND_REAL) <= set(grid.table.columns)
        figure = attribution_patching_grid(grid) if has_both else patching_grid(grid)
        return [figure], markup(repr(grid))
    if lists := _lists_with(content, SURGERY):
        name, lines = lists[0]
        effects = pd.DataFrame(lines)
        note = f"{name}, of {path.name}: normalised logit difference of the answer, 0 as it was, "
        note += "1 as the other question"
        return [coin_rows_figure(effects, unit=unit) for unit in effects.unit.unique()], markup(note)
    if lists := _lists_with(content, PROBE):
        figures = [probe_figure(pd.DataFrame(lines)) for _, lines in lists[:MOST_FIGURES]]
        for figure, (name, _) in zip(figures, lists, strict=False):
            if len(lists) > 1:
                figure.update_layout(title_text=f"{markup(name.removesuffix(' · lines'))}: {figure.layout.title.text}")
        left_out = f" {len(lists) - len(figures)} more are not drawn." if len(lists) > len(figures) else ""
        return figures, markup(f"Of {path.name}.{left_out}")
    return [], ""


def _grid(path: Path) -> "PatchingGrid":
    """Returns a stored patching grid."""
    from cacheprobe.edits.patching.grid import PatchingGrid

    return PatchingGrid.load(path)


def _is_grid(content: object) -> bool:
    return isinstance(content, dict) and str(content.get("format", "")).startswith("cacheprobe patching grid")


def _lists_with(content: object, columns: set[str]) -> list[tuple[str, list[JsonDict]]]:
    """Returns a list of (path of keys, list of dicts): the lists in a JSON value in which every dict has these
    columns."""
    found = [(keys, lines) for keys, lines in _record_lists(content) if all(columns <= set(line) for line in lines)]
    return [(" · ".join(keys), lines) for keys, lines in found]


def _record_lists(content: object, keys: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], list[JsonDict]]]:
    """Returns a list of (path of keys, list of dicts): the lists of dicts in a JSON value that are reached through
    dicts alone."""
    if isinstance(content, dict):
        return [one for key, value in content.items() for one in _record_lists(value, (*keys, key))]
    return [(keys, content)] if isinstance(content, list) and _is_records(content) else []


def _is_records(value: object) -> bool:
    """Returns True if a JSON value is a list of dicts, not empty."""
    return isinstance(value, list) and bool(value) and all(isinstance(line, dict) for line in value)


def _plain_values(content: object, name: str = "") -> list[tuple[str, object]]:
    """Returns a list of (path of keys joined by " · ", value): all values in a JSON value that are outside lists of
    records."""
    if isinstance(content, dict):
        named = ((f"{name} · {key}" if name else key, value) for key, value in content.items())
        return [one for of_key, value in named for one in _plain_values(value, of_key)]
    return [] if _is_records(content) else [(name, content)]
