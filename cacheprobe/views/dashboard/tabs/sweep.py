"""Shows a sweep: small multiples over any two of its axes, and its cells, each with a button that opens its run."""

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from cacheprobe.core.values import JsonDict
from cacheprobe.views.dashboard.questions import CannotShow, PageAnswer, PageQuestion
from cacheprobe.views.dashboard.run_list import RunList
from cacheprobe.views.dashboard.tabs.tables import selected_lines, selecting_code, sortable
from cacheprobe.views.dashboard.view import View, button
from cacheprobe.views.sweep_grid import MOST, NONE, in_order, sweep_grid
from cacheprobe.views.text import markup

if TYPE_CHECKING:
    from cacheprobe.sweeps.results import Sweep


def is_sweep(content: object) -> bool:
    """Returns True if the content of a result file is the plan of a sweep."""
    return isinstance(content, dict) and content.get("format") == "cacheprobe sweep"


class SweepCells(View):
    """The sweep in a folder: the small multiples over two axes, buttons for other axes, and a table of the cells.
    Without two axes that differ, or without readings, the table alone.

    question["facet"]: "ROWS.COLUMNS", two axes that differ among the cells; by default the first two. For an axis with
    too many values, pages of them: "ROWS.COLUMNS.2.0" is the third page of ROWS.
    """

    def __init__(self, run_list: RunList, question: PageQuestion, folder: Path) -> None:
        super().__init__(run_list, question)
        self.folder = folder

    @cached_property
    def sweep(self) -> "Sweep":
        """Results of the sweep."""
        from cacheprobe.sweeps.results import load_sweep

        return load_sweep(self.folder)

    @cached_property
    def varied(self) -> Mapping[str, Sequence[object]]:
        """By axis that differs among the cells: its values in order."""
        from cacheprobe.sweeps.results import AXIS_COLUMNS

        values = {name: in_order(_axis_values(self.sweep.cells, name).unique()) for name in AXIS_COLUMNS}
        return {name: of_axis for name, of_axis in values.items() if len(of_axis) > 1}

    @property
    def pairs(self) -> list[str]:
        """Pairs of axes that can be drawn, as "ROWS.COLUMNS"; the first goes downwards."""
        return [] if self.sweep.layers.empty else [f"{a}.{b}" for a, b in permutations(self.varied, 2)]

    @cached_property
    def pages(self) -> dict[str, int]:
        """By drawn axis: the number of the page of its values; {} if nothing can be drawn. Raises: CannotShow for an
        unknown facet."""
        if not self.pairs:
            return {}
        facet = self.question.get("facet", self.pairs[0])
        parts = str(facet).split(".")
        axes, numbers = parts[:2], parts[2:] or ["0", "0"]
        if ".".join(axes) not in self.pairs or len(numbers) != 2:
            raise CannotShow(f"there is no facet {facet!r:.60}; there are {', '.join(self.pairs)}")
        for name, number in zip(axes, numbers, strict=True):
            last_page = (len(self.varied[name]) - 1) // MOST
            if not (number.isascii() and number.isdecimal()) or len(number) > 9 or int(number) > last_page:
                raise CannotShow(f"there is no stretch {number!r:.20} of {name}; there are 0 to {last_page}")
        return dict(zip(axes, map(int, numbers), strict=True))

    def shown(self, axis: str, page: int) -> list[object]:
        """Returns the values of an axis on a page."""
        return list(self.varied[axis][page * MOST : (page + 1) * MOST])

    def drawn(self, table: pd.DataFrame) -> pd.DataFrame:
        """Returns the lines of a table of cells or layers whose values are drawn."""
        for name, page in self.pages.items():
            table = table[_axis_values(table, name).isin(self.shown(name, page))]
        return table

    @cached_property
    def cells(self) -> pd.DataFrame:
        """Drawn cells: their axes that differ, and results."""
        return self.drawn(self.sweep.cells)[["digest", *self.varied, "tokens", "acceptance", "accuracy"]]

    def draw(self) -> PageAnswer:
        """Returns the figure with the buttons for other axes, and the table of the cells."""
        sweep = self.sweep
        about = f"{len(sweep.cells)} cells of the sweep {self.folder.name}"
        about += f", {len(sweep.pending)} more are planned" if sweep.pending else ""
        about += f"; {sweep.num_others} of other plans or versions are left out" if sweep.num_others else ""
        note = f"<p class='note'>{markup(about)}. A cell's button opens its run.</p>"
        lines = sortable(self.table(), len(self.cells), self.question, {"digest": self._opening_button})
        more = f"<h3>Cells</h3>{lines}"
        if not self.pages:
            has_axes = len(self.varied) > 1
            reason = "No cell kept readings (run.capture: Z)" if has_axes else "Fewer than two axes have several values"
            return {"html": f"<h2>{reason}, so there is nothing to put side by side</h2>{note}", "more": more}
        figure = sweep_grid(self.drawn(sweep.layers), *self.pages)
        html = f"<h2>{figure.layout.title.text}</h2>{note}{self._facet_buttons()}"
        return {"html": html, "graphs": self.graphs("result", [figure]), "more": more}

    def _opening_button(self, digest: object, _line: JsonDict) -> str:
        """Returns HTML of the button of a cell; its digest, if its run is not at hand."""
        number, name = self.run_list.numbers().get(str(digest)), str(digest)[:8]
        return markup(name) if number is None else button(name, intent="open", run=number)

    def _facet_buttons(self) -> str:
        """Returns HTML: a button for each pair of axes; and for each axis with more values than are drawn at once, a
        button for each page of values."""
        pair = ".".join(self.pages)
        choice = partial(button, intent="set", name="facet")
        buttons = "".join(choice(" × ".join(one.split(".")), one == pair, value=one) for one in self.pairs)
        lines = [f'<div class="verdicts">{buttons}</div>']
        for name in (name for name in self.pages if len(self.varied[name]) > MOST):
            buttons = ""
            for page in range(-(-len(self.varied[name]) // MOST)):
                values = self.shown(name, page)
                facet = ".".join([pair, *map(str, {**self.pages, name: page}.values())])
                label = f"{values[0]} to {values[-1]}" if len(values) > 1 else str(values[0])
                buttons += choice(label, page == self.pages[name], value=facet)
            lines.append(f'<div class="verdicts">{markup(name)}: {buttons}</div>')
        return "".join(lines)

    def table(self) -> pd.DataFrame:
        """Returns the cells, as they are sorted and filtered."""
        return selected_lines(self.cells, self.question)

    def code(self) -> list[str]:
        """Returns the code of the cells and of the figure."""
        code = ["import cacheprobe as cp", "", f"sweep = cp.load_sweep({str(self.folder)!r})", "cells = sweep.cells"]
        code += ["layers = sweep.layers"] if self.pages else []
        for name, page in self.pages.items():
            values = self.shown(name, page)
            if len(values) < len(self.varied[name]):
                for table in ("cells", "layers"):
                    column = f'{table}[{name!r}].astype(object).where({table}[{name!r}].notna(), "none")'
                    code += [f"{table} = {table}[{column}.isin({values!r})]"]
        code += [f"table = cells[{list(self.cells.columns)!r}]", *selecting_code(self.cells, self.question)]
        return [*code, f"cp.plots.sweep_grid(layers, {', '.join(map(repr, self.pages))})" if self.pages else "table"]


def _axis_values(table: pd.DataFrame, axis: str) -> pd.Series:
    """Returns the values of an axis as a Series, with the text "none" for missing values."""
    return table[axis].astype(object).where(table[axis].notna(), NONE)
