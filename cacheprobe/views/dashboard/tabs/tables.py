"""Sorts and filters any table for the page, and draws it with heads that sort it."""

import json
from collections.abc import Callable, Collection, Mapping

import pandas as pd

from cacheprobe.core.hook_names import site_label
from cacheprobe.core.values import JsonDict
from cacheprobe.views.dashboard.questions import PageQuestion
from cacheprobe.views.overview.selection import MOST_LETTERS, question_text
from cacheprobe.views.text import markup, plain, shorten

MOST_LINES = 200
"""Largest number of lines that are drawn."""
MOST_COLUMNS = 120
"""Largest width of a list in a cell, in columns of a monospaced font."""

CellHtml = Callable[[object, JsonDict], str]
"""Function (value, line as a dict) -> HTML inside of a cell."""


def selected_lines(table: pd.DataFrame, question: PageQuestion) -> pd.DataFrame:
    """Returns the lines of a table that a question filters, in the order that it names.

    question: filter, a text that a line has in one of its cells, case ignored; order, a column's name, with "-" in
    front for the largest first. A column that the table does not have is ignored: the address may come from another
    table. Raises: CannotShow for values of other kinds.
    """
    wanted, column = question_text(question, "filter"), ordered_column(table, question)
    if wanted and len(table):
        texts = table.map(str).agg("\n".join, axis=1).str.casefold()
        table = table[texts.str.contains(wanted.casefold(), regex=False)]
    if column is not None:
        is_rising = not question_text(question, "order").startswith("-")
        table = table.sort_values(column, kind="stable", ascending=is_rising, key=_sort_key)
    return table


def _sort_key(values: pd.Series) -> pd.Series:
    """Returns what a column is sorted by: its numbers, or its texts with their case ignored."""
    return values.astype("Float64") if _has_numbers(values) else values.map(str, na_action="ignore").str.casefold()


def selecting_code(table: pd.DataFrame, question: PageQuestion) -> list[str]:
    """Returns the lines of Python that do to `table` what `selected_lines` does. table: not yet selected."""
    wanted, column = question_text(question, "filter"), ordered_column(table, question)
    code = []
    if wanted:
        code += [
            'texts = table.map(str).agg("\\n".join, axis=1).str.casefold()',
            f"table = table[texts.str.contains({wanted.casefold()!r}, regex=False)]",
        ]
    if column is not None:
        as_letters = 'values.map(str, na_action="ignore").str.casefold()'
        key = 'values.astype("Float64")' if _has_numbers(table[column]) else as_letters
        is_rising = not question_text(question, "order").startswith("-")
        code += [
            f'table = table.sort_values({column!r}, kind="stable", ascending={is_rising}, key=lambda values: {key})'
        ]
    return code


def ordered_column(table: pd.DataFrame, question: PageQuestion) -> str | None:
    """Returns the column of a table that a question sorts by; None for none."""
    column = question_text(question, "order").removeprefix("-")
    return column if column in table.columns else None


def sortable(
    table: pd.DataFrame, total: int, question: PageQuestion, cells: Mapping[str, CellHtml] | None = None
) -> str:  # fmt: skip
    """Returns HTML: a box that filters a table, the number of lines, and the table with heads that sort it. The box has
    no value: the page's script sets it, so an answer does not change what is typed meanwhile.

    table: from `selected_lines`; at most 200 lines are drawn.  total: number of lines without the filter.
    cells: functions that draw the cells of some columns; others are drawn as text.
    """
    drawn, wanted, found = table.head(MOST_LINES), question_text(question, "filter"), len(table)
    labels = {str(name): str(name) for name in table.columns}
    numbers = {name for name in labels if _has_numbers(table[name])}
    lines = "".join(_line(line, numbers, cells or {}) for line in drawn.to_dict("records"))
    head = f"<thead><tr>{sorting_heads(labels, numbers, question_text(question, 'order'), 'order')}</tr></thead>"
    shown = f"<div class='scroll'><table class='sorts'>{head}<tbody>{lines}</tbody></table></div>"
    if not found:
        said = f"No line has “{markup(plain(wanted))}” in it." if wanted else "The table has no line."
        shown = f"<p class='refused'>{said}</p>"
    of_all = f" of {total:,}" if found != total else ""
    first = f", the first {len(drawn):,} shown" if len(drawn) < found else ""
    return (
        f"<div class='finder'><input type='search' id='result-filter' maxlength='{MOST_LETTERS}' placeholder='filter "
        "lines' aria-label='filter the lines of the table' autocomplete='off' spellcheck='false'>"
        f"<span class='note' role='status'>{found:,}{of_all} line{'s' * (total != 1)}{first}</span></div>{shown}"
    )


def as_text(value: object) -> str:
    """Returns a value as it is shown in a cell: a fraction with four significant digits, a list as JSON, "—" for
    none."""
    if value is None or value is pd.NA or value != value:
        return "—"
    if isinstance(value, list | dict):
        return shorten(json.dumps(value, ensure_ascii=False), MOST_COLUMNS)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}"


def _has_numbers(values: pd.Series) -> bool:
    """Returns whether the known values of a column are numbers."""
    known = values.dropna().infer_objects()
    return pd.api.types.is_numeric_dtype(known) and not pd.api.types.is_bool_dtype(known)


def _line(line: JsonDict, numbers: Collection[str], cells: Mapping[str, CellHtml]) -> str:
    parts = []
    for name, value in line.items():
        text = site_label(value) if name == "site" and isinstance(value, str) else as_text(value)
        inside = cells[name](value, line) if name in cells else markup(text)
        parts.append(f"<td{' class=number' if name in numbers else ''}>{inside}</td>")
    return f"<tr>{''.join(parts)}</tr>"


def sorting_heads(labels: Mapping[str, str], numbers: Collection[str], sort: str, intent: str) -> str:
    """Returns HTML of the heads of columns, each a button that sorts: smallest first, largest first, as it was.

    labels: by key of the column.  numbers: keys of columns of numbers.  sort: key of the column that sorts, with "-" in
    front for the largest first.  intent: what the page's script does with a press.
    """
    parts, is_falling = [], sort.startswith("-")
    for key, label in labels.items():
        is_sorted, side = sort.removeprefix("-") == key, " class=number" if key in numbers else ""
        aria = f" aria-sort={'descending' if is_falling else 'ascending'}" if is_sorted else ""
        sign = (" ▼" if is_falling else " ▲") if is_sorted else ""
        button = f'<button data-intent="{intent}" data-{intent}="{markup(key)}">{markup(label)}{sign}</button>'
        parts.append(f"<th{side}{aria}>{button}</th>")
    return "".join(parts)


def pages(says: str, page: int, last_page: int, about: Callable[[int], str]) -> str:
    """Returns HTML: which lines are shown, and buttons to the other pages; one that leads to no other page cannot be
    pressed.

    says: which lines.  page, last_page: from 0.  about: function (page) -> attributes of the button that leads there.
    """
    signs = (("first", "«", 0), ("previous", "‹", page - 1), ("next", "›", page + 1), ("last", "»", last_page))
    buttons = ""
    for name, sign, to in signs:
        state = "" if 0 <= to <= last_page and to != page else " disabled"
        buttons += f"<button class='icon' title='{name} page' {about(to)}{state}>{sign}</button>"
    return f"<div class='pages'><span role='status'>{says}</span>{buttons if last_page else ''}</div>"
