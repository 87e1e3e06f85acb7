"""Shows the whole run at a glance, and the table of all its tokens."""

import math
from functools import cached_property

import pandas as pd

from cacheprobe.core.values import TableLine
from cacheprobe.trace.tables.token_table import searchable
from cacheprobe.views.dashboard.questions import CannotShow
from cacheprobe.views.dashboard.run_tables import RunTables
from cacheprobe.views.dashboard.tabs.tables import pages, sorting_heads
from cacheprobe.views.dashboard.view import View, opened
from cacheprobe.views.overview.figures import Links, overview_picture
from cacheprobe.views.overview.selection import (
    COLUMNS,
    MOST_LETTERS,
    QUESTIONS,
    RANGES,
    VERDICTS,
    TokenSelection,
    code_of,
)
from cacheprobe.views.overview.table import EXPLAINED, NUMBERS, line_html
from cacheprobe.views.text import counted, markup, plain, shorten

LINES_A_PAGE = 50


class RunSummary(View):
    """The figures of the whole run. A press on a token opens it, one on a request lists its tokens."""

    notebook = (
        "tokens = cp.analysis.token_table(trace)",
        'table = tokens.groupby("request_id").verdict.value_counts().unstack(fill_value=0).reset_index()',
        "cp.plots.run_overview(trace)",
    )

    def draw(self) -> str:
        """Returns HTML of the figures."""
        if self.tables.tokens.lines.empty:
            return "<h2>No token is committed yet</h2>"
        found = overview_picture(self.tables.tokens, self.tables.run.events, Links(_token, _request, _bar))
        found.note += " <button class='text' data-jump='tokens-card'>All tokens as a table ↓</button>"
        return found.html

    def table(self) -> pd.DataFrame:
        """Returns how many tokens of each verdict each request has."""
        lines = self.tables.tokens.lines
        return lines.groupby("request_id").verdict.value_counts().unstack(fill_value=0).reset_index()


class TokenList(View):
    """The table of all tokens, as it is searched, filtered and sorted."""

    @cached_property
    def selection(self) -> TokenSelection:
        """What the table holds, and in which order. Raises: ValueError for a value of another form."""
        return TokenSelection.of(self.question)

    def table(self) -> pd.DataFrame:
        """Returns the lines of all pages."""
        return self.tables.token_lines(self.selection)

    def code(self) -> list[str]:
        """Returns the code of the table."""
        return [*opened(self.tables), *code_of(self.selection)]

    def draw(self) -> str:
        """Returns HTML: the search, the filters, and one page of the table, or what is wrong with the search. A line
        carries data-request, data-step and data-position: those of the row that predicts the token."""
        tables = self.tables
        try:
            selection, refused = self.selection, ""
        except ValueError as error:  # the boxes stay, so that what is typed can be mended
            selection, refused = TokenSelection(), f"<p class='refused'>{markup(str(error))}</p>"
        note = f"<p class='note'>{_note(tables)}</p>"
        note += (
            f"<details class='ranges'><summary>what the columns say</summary><p class='note'>{EXPLAINED}</p></details>"
        )
        head = f"<h2>All tokens</h2>{note}{_finder(self.question)}{_filters(self)}"
        return head + (refused or self._lines(selection))

    def _lines(self, selection: TokenSelection) -> str:
        """Returns HTML of one page of the table, with how many lines there are, and which are not known."""
        tables, lines = self.tables, self.table()
        total = len(tables.token_lines(TokenSelection(is_each=selection.is_each)))
        last_page = max(math.ceil(len(lines) / LINES_A_PAGE) - 1, 0)
        page = min(_page(self.question.get("page")), last_page)
        shown = lines.iloc[page * LINES_A_PAGE : (page + 1) * LINES_A_PAGE]
        first = page * LINES_A_PAGE + 1
        says = f"{len(lines):,} of {total:,} lines" if len(lines) < total else f"{total:,} lines"
        says += f", {first:,} to {first + len(shown) - 1:,} shown" if len(shown) < len(lines) else ""
        bar = pages(says, page, last_page, lambda to: f"data-intent='tokens' data-name='page' data-value='{to}'")
        bar += self._also(selection, lines)
        if lines.empty:
            which = "No single token matches the pattern" if selection.is_pattern else "No token is found"
            return f"{bar}<p class='refused'>{which}.</p>"
        labels = {key: heading for key, (heading, _) in COLUMNS.items()}
        heads = sorting_heads(labels, NUMBERS, selection.sort, "arrange")
        body = "".join(map(_line, shown.itertuples()))
        table = f"<table class='rejected all-tokens'><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"
        return f"{bar}<div class='scroll'>{table}</div>"

    def _also(self, selection: TokenSelection, lines: pd.DataFrame) -> str:
        """Returns HTML: what else is to be known of the lines: how many a range leaves out because they lack its
        number, how many rejections the lines stand for, and which prompts have the searched text."""
        said = []
        if selection.ranges:
            others = self.tables.token_lines(selection._replace(ranges=(), is_each=True))
            columns = [COLUMNS[key][1] for key, *_ in selection.ranges]
            if count := int(others[columns].isna().any(axis=1).sum()):
                said.append(f"Not in the list: {counted(count, 'line')} without a number in one of the ranges.")
        rejected = lines[lines.verdict == "rejected"]
        if int(rejected.times.sum()) > len(rejected):
            said.append(f"{rejected.times.sum():,} rejections share {counted(len(rejected), 'line')}.")
        if selection.find and not selection.is_pattern:
            wanted = searchable(selection.find)
            with_it = sum(wanted in text[: starts[n]] for text, starts, n in self.tables.request_texts.values())
            prompts = f"stands in the prompts of {counted(with_it, 'request')}: the first token after each is listed."
            said += [f"“{markup(shorten(plain(selection.find), 40))}” {prompts}"] if with_it else []
        return f"<p class='note'>{' '.join(said)}</p>" if said else ""


def _token(request: int, step: int, position: int, inside: str) -> str:
    about = f"data-intent='draft' data-request='{request}' data-step='{step}' data-position='{position - 1}'"
    return f"<button class='text' {about}>{inside}</button>"


def _listed(request: int) -> str:
    return f"data-intent='tokens' data-name='requests' data-value='{request}' data-jump='tokens-card'"


def _request(request: int, inside: str) -> str:
    return f"<button class='text' {_listed(request)}>{inside}</button>"


def _bar(request: int, inside: str) -> str:
    return f"<g class='pressed' {_listed(request)}>{inside}</g>"


def _line(line: TableLine) -> str:
    """Returns HTML of one line of the table."""
    about = f"data-request='{line.request_id}' data-step='{line.step}' data-position='{line.position - 1}'"
    return f"<tr data-intent='draft' tabindex='-1' {about}>{line_html(line)}</tr>"


def _page(value: object) -> int:
    """Returns the number of a page from the question's text; 0 for None. Raises: CannotShow for another text."""
    if value is None:
        return 0
    if not isinstance(value, str) or not value.isdecimal() or len(value) > 9:
        raise CannotShow(f"page is a whole number, got {value!r:.40}")
    return int(value)


def _note(tables: RunTables) -> str:
    """Returns a sentence, as HTML, on what the run lacks, and on how to open a token."""
    says = "Every committed token, and every rejected draft token. A click or Enter opens a line."
    if tables.run.has_readings:
        has_layer = tables.tokens.lines.first_at_drafter_layer.notna().any()
        return says if has_layer else f"{says} No draft ended at a layer that was read, so none has “drafter’s layer”."
    why = 'read no lens yet (<code>lens="later"</code>)' if tables.run.is_unread else "recorded no lens readings (Z)"
    return f"{says} This run {why}: what layers predicted is not known."


def _finder(question: dict[str, object]) -> str:
    """Returns HTML of the search box, and of what it searches for. The box has no value: the page's script sets it."""

    def toggle(name: str, value: str, label: str, says: str) -> str:
        """Returns HTML of a button that sets a value, or removes it."""
        pressed = "true" if question.get(name) == value else "false"
        about = f"data-intent='tokens' data-name='{name}' data-value='{value}' data-toggle='true' title='{says}'"
        return f"<button class='plain' {about} aria-pressed='{pressed}'>{label}</button>"

    is_pattern = question.get("way") == "pattern"
    return (
        f"<div class='finder'><input type='search' id='tokens-search' maxlength='{MOST_LETTERS}' data-tokens='find' "
        f"placeholder='{'a pattern for one token' if is_pattern else 'search prompts and outputs'}  ( / )' "
        "aria-label='search all tokens' autocomplete='off' spellcheck='false'>"
        + toggle("way", "pattern", "regular expression", "match single tokens with a regular expression (RE2)")
        + toggle("each", "1", "each rejection", "give each of several equal rejections a line")
        + "<button class='plain' data-intent='every'>show all</button></div>"
    )


def _filters(view: TokenList) -> str:
    """Returns HTML of the filters. The page's script sets their values."""
    has_readings = view.tables.run.has_readings
    known = QUESTIONS if has_readings else {}
    menus = {"verdict": {name: name for name in VERDICTS}, "asked": {key: words for key, (words, _) in known.items()}}
    labels = {"verdict": "verdict", "asked": "only where"}
    parts = [
        f"<label>{labels[name]} <select data-tokens='{name}'><option value=''>any</option>"
        + "".join(f"<option value='{key}'>{markup(words)}</option>" for key, words in options.items())
        + "</select></label>"
        for name, options in menus.items() if options
    ]  # fmt: skip
    parts.append(
        "<label>requests <input type='text' data-tokens='requests' placeholder='3, 7, 10-20' "
        f"maxlength='{MOST_LETTERS}' autocomplete='off'></label>"
    )
    ranges = ""
    for name in RANGES if has_readings else ("logprob",):
        says = COLUMNS[name][0]
        ends = (
            f"<input type='number' step='any' data-tokens='{name} {i}' aria-label='{says}, {end}' placeholder='{end}'>"
            for i, end in enumerate(("least", "most"))
        )
        ranges += f"<span>{says} {' to '.join(ends)}</span>"
    is_open = " open" if any(view.question.get(name) for name in RANGES) else ""
    return (
        f"<div class='filters'>{''.join(parts)}</div>"
        f"<details class='ranges'{is_open}><summary>ranges</summary><div class='filters'>{ranges}</div></details>"
    )
