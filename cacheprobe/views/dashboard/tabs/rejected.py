"""Lists the rejected drafts of a run, and finds the next or previous one from a chosen place."""

import math
import re
from functools import cached_property

import pandas as pd

from cacheprobe.core.values import JsonDict, TableLine
from cacheprobe.trace.tables.rejected import TOKENS_AROUND
from cacheprobe.views.dashboard.facts import request_story, why_none_rejected
from cacheprobe.views.dashboard.questions import CannotShow, PageQuestion, number, whole
from cacheprobe.views.dashboard.run_list import RunList
from cacheprobe.views.dashboard.run_tables import RunTables
from cacheprobe.views.dashboard.tabs.tables import pages, sorting_heads
from cacheprobe.views.dashboard.view import View, opened
from cacheprobe.views.rejected import (
    COLUMNS,
    FLIP_WORDS,
    LINES_A_PAGE,
    Range,
    Selection,
    cells_of,
    searchable,
    walked,
)
from cacheprobe.views.text import markup, plain, shorten, text_of, token_label

MOST_LETTERS = 200
"""Largest length of a searched text."""
_WIDTH = 28
"""Largest width of the text on one side of a token, in columns of a monospaced font."""
_NUMBERS = ("request", "step", "position", "drafter", "flip", "margin")


class RejectedDrafts(View):
    """The list of rejected drafts, as it is searched, filtered and sorted."""

    @cached_property
    def selection(self) -> Selection:
        """What the list holds, and in which order. Raises: CannotShow for values of other kinds."""
        find, sort, request = (self.question.get(name) for name in ("find", "sort", "request"))
        if not isinstance(find or "", str) or len(find or "") > MOST_LETTERS:
            raise CannotShow(f"a searched text has at most {MOST_LETTERS} letters")
        if sort and (not isinstance(sort, str) or sort.removeprefix("-") not in COLUMNS):
            raise CannotShow(f"the list is sorted by {', '.join(COLUMNS)}, got {sort!r:.40}")
        if request is not None:
            request = self.request
        drafter, flips, margin = (self.question.get(name) or None for name in ("drafter", "flips", "margin"))
        if drafter is not None and not (isinstance(drafter, str) and re.fullmatch(r"none|[0-9]{1,9}", drafter)):
            raise CannotShow(f"the drafter’s layer is a number or none, got {drafter!r:.40}")
        layer = None if drafter is None else -1 if drafter == "none" else int(drafter)
        flip_range = flips if flips == "none" else _range(flips, "flips")
        return Selection(find or "", sort or "", request, layer, flip_range, _range(margin, "margin"))

    def draw(self) -> str:
        """Returns HTML: one page of the list, with the search, the filter and the pages. A line carries data-request,
        data-step and data-position: those of the row that predicts the drafted token. A sentence, if no draft was
        rejected."""
        tables, selection = self.tables, self.selection
        drafts, lines = tables.rejected, self.table()
        if drafts.empty:
            so_far = " so far" if "growing" in tables.run.meta else ""
            why = why_none_rejected(tables)
            note = markup(f"{why[0].upper()}{why[1:]}.")
            return f"<h2>No draft of {markup(tables.name)} was rejected{so_far}</h2><p class='note'>{note}</p>"
        last_page = max(math.ceil(len(lines) / LINES_A_PAGE) - 1, 0)
        page = number(self.question["page"], "page") if self.question.get("page") is not None else 0
        page = min(max(page, 0), last_page)
        shown = lines.iloc[page * LINES_A_PAGE : (page + 1) * LINES_A_PAGE]
        body = "".join(_line(tables, line, selection.find) for line in shown.itertuples())
        count, num_requests = len(drafts), drafts.request_id.nunique()
        labels = {key: heading for key, (heading, _) in COLUMNS.items()}
        heads = sorting_heads(labels, _NUMBERS, selection.sort, "sort")
        head = f"<thead><tr>{heads}<th>text around</th></tr></thead>"
        finding = f"{count:,} draft{'s were' if count != 1 else ' was'} rejected, "
        finding += f"in {num_requests:,} request{'s' * (num_requests != 1)}"
        return (
            f"<h2>{finding}</h2><p class='note'>{_note(tables)}</p>"
            f"{_finder(selection)}{_filters(tables)}{_pages(len(lines), page, last_page)}"
            f"{_left_out(tables, selection)}"
            + (f"<div class='scroll'><table class='rejected'>{head}<tbody>{body}</tbody></table></div>"
               if len(lines) else f"<p class='refused'>{markup(_nothing_found(selection))}</p>")
        )  # fmt: skip

    def table(self) -> pd.DataFrame:
        """Returns the lines of all pages of the list, as `Trace.rejected`."""
        return self.tables.rejected_lines(self.selection)

    def code(self) -> list[str]:
        """Returns the code of the list."""
        selection = self.selection
        code = [*opened(self.tables), "table = trace.rejected()"]
        condition = selection.condition
        code += [f'table = table.query({condition!r}, engine="python")'] if condition else []
        if selection.find:
            code += [
                "texts, requests, tokens = trace.token_texts, trace.requests, trace.tokens",
                "ids = {r: [*requests[r].prompt_token_ids, *tokens[r]] for r in set(table.request_id)}",
                "places = zip(table.request_id, table.position)",
                "before = [''.join(texts[i] for i in ids[request][:position]) for request, position in places]",
                'said = before + table.drafted_token + "\\n" + before + table.committed_token.fillna("")',
                'said = said.str.replace("␣", " ").str.casefold()',
                f"table = table[said.str.contains({searchable(selection.find)!r}, regex=False)]",
            ]  # fmt: skip
        if selection.sort:
            column = COLUMNS[selection.sort.removeprefix("-")][1]
            as_text = ', key=lambda texts: texts.str.replace("␣", " ").str.casefold()'
            key, is_rising = as_text if column.endswith("token") else "", not selection.sort.startswith("-")
            code += [f'table = table.sort_values({column!r}, kind="stable", ascending={is_rising}{key})']
        return [*code, "table"]


def walk(run_list: RunList, question: PageQuestion) -> JsonDict:
    """Returns the rejected draft that is question["by"] lines on in the list from a place, as a dict: request, step,
    position (of the row that predicts the drafted token), page of the list, and for another request story, what
    `facts.request_story` returns of it, which the page needs next. If there is none: says, a sentence.

    question: request, step and position of the place, which a row predicts; and what the list holds, as for
    `RejectedDrafts`.
    """
    view = RejectedDrafts(run_list, {**question, "request": question.get("among")})
    selection, by, lines = view.selection, number(question["by"], "by"), view.table()
    if not by:
        raise CannotShow("by is a number other than 0")
    request = whole(question["request"], "request", len(view.tables.run.requests))
    place = (request, number(question["step"], "step"), number(question["position"], "position") + 1)
    target = walked(lines, bool(selection.sort), place, by)
    if target is None:
        if view.tables.rejected.empty:
            return {"says": "no draft of this run was rejected"}
        limits = " in the list as it is searched, sorted or filtered" if selection != Selection() else ""
        return {"says": f"there is no rejected draft {'after' if by > 0 else 'before'} this place{limits}"}
    line = lines.iloc[target]
    found = int(line.request_id)
    answer: JsonDict = {"request": found, "step": int(line.step), "position": int(line.position) - 1}
    if found != request:
        answer["story"] = request_story(run_list, {"run": question["run"], "request": found})
    return {**answer, "page": target // LINES_A_PAGE}


def _range(value: object, what: str) -> Range | None:
    """Returns (least, most) of a text "LEAST:MOST", where either can be missing; None for None. Raises: CannotShow for
    anything else."""
    if value is None:
        return None
    try:
        least, most = (float(end) if end else None for end in str(value).split(":"))
    except ValueError:
        raise CannotShow(f"{what} is LEAST:MOST, such as 2:5, 2: or :5, got {value!r:.40}") from None
    return least, most


def _note(tables: RunTables) -> str:
    """Returns HTML: what a line is, and what the run lacks."""
    said = "A line is the first token of a draft that the verifier did not choose; a click or Enter opens it. "
    if tables.run.has_readings:
        return said + (
            f"{FLIP_WORDS} The lens is the recorded one, {markup(tables.run.meta['lens'])}. The margin is how much "
            "more log-probability the last layer gives to the committed token (“&gt;”: the drafted token is not among "
            "the top tokens read)."
        )
    why = 'read no lens yet (<code>lens="later"</code>)' if tables.run.is_unread else "recorded no lens readings (Z)"
    return said + f"This run {why}: the layer from which the committed token is first, and its margin, are not known."


def _nothing_found(selection: Selection) -> str:
    of_request = "" if selection.request is None else f" of request {selection.request}"
    found = f" has “{shorten(plain(selection.find), 60)}” in it or before it" if selection.find else ""
    filters = (selection.drafter, selection.flips, selection.margin)
    limited = " passes the filters" if any(one is not None for one in filters) else ""
    said = " and".join(filter(None, (found, limited))) or " is there"
    return f"No rejected draft{of_request}{said}."


def _finder(selection: Selection) -> str:
    """Returns HTML of the search box and the filter. The box has no value: the page's script sets it, so an answer
    does not change what is typed meanwhile."""
    pressed = "false" if selection.request is None else "true"
    return (
        f"<div class='finder'><input type='search' id='rejected-search' maxlength='{MOST_LETTERS}' "
        "placeholder='search the tokens and all text before  ( / )' aria-label='search rejected drafts' "
        "autocomplete='off' spellcheck='false'>"
        f"<button class='plain' data-intent='among' aria-pressed='{pressed}'>only the chosen request</button></div>"
    )


def _filters(tables: RunTables) -> str:
    """Returns HTML of the filters by layer and margin. The page's script sets their values."""
    layers = tables.rejected.drafter_layer
    options = [f"<option>{layer}</option>" for layer in sorted(layers.dropna().astype(int).unique().tolist())]
    options += ["<option value='none'>none</option>"] if layers.isna().any() else []
    boxes = ""
    for name, rule in (("flips", "min='0' step='1'"), ("margin", "step='any'")) if tables.run.has_readings else ():
        says = COLUMNS[name.removesuffix("s")][0]
        ends = (
            f"<input type='number' {rule} data-filter='{name} {i}' aria-label='{says}, {end}' placeholder='{end}'>"
            for i, end in enumerate(("least", "most"))
        )
        boxes += f"<span>{says} {' to '.join(ends)}</span>"
    return (
        "<div class='filters'><label>drafter’s layer <select data-filter='drafter'><option value=''>any</option>"
        f"{''.join(options)}</select></label>{boxes}"
        "<button class='plain' data-intent='unfiltered'>show all</button></div>"
    )


def _pages(count: int, page: int, last_page: int) -> str:
    """Returns HTML: which lines are shown, and buttons to the other pages."""
    first, last = page * LINES_A_PAGE + 1, min((page + 1) * LINES_A_PAGE, count)
    says = f"{first:,} to {last:,} of {count:,}" if count > 1 else _lines(count)
    return pages(says, page, last_page, lambda to: f"data-intent='page' data-page='{to}'")


def _left_out(tables: RunTables, selection: Selection) -> str:
    """Returns HTML: how many lines a range leaves out, and nothing else does, because they lack its number; "" if
    none."""
    said = []
    if isinstance(selection.flips, tuple):
        without_layer = len(tables.rejected_lines(selection._replace(flips="none")))
        lists = "<button class='plain' data-intent='filter' data-name='flips' data-value='none'>list them</button>"
        said += [f"{_lines(without_layer)} without such a layer {lists}"] if without_layer else []
    if selection.margin is not None and selection.margin[1] is not None:
        unknown = int(tables.rejected_lines(selection._replace(margin=None)).margin_nats.isna().sum())
        said += [f"{_lines(unknown)} of whose margin only the least is known"] if unknown else []
    return f"<p class='note'>Not in this list: {'; '.join(said)}.</p>" if said else ""


def _lines(count: int) -> str:
    return f"{count:,} line{'s' * (count != 1)}"


def _line(tables: RunTables, line: TableLine, find: str) -> str:
    """Returns HTML of one line of the list. find: the text that was searched for."""
    cells = {key: markup(str(value)) for key, value in cells_of(line).items()}
    shown = [
        *(f"<td class='{key}'>{cells[key]}</td>" for key in ("drafted", "committed")),
        *(f"<td class='number' data-name='{COLUMNS[key][0]}'>{cells[key]}</td>" for key in _NUMBERS),
        f"<td class='around'>{_far_before(line, find)}{_text_around(tables, line)}</td>",
    ]
    about = f"data-request='{line.request_id}' data-step='{line.step}' data-position='{line.position - 1}'"
    return f"<tr data-intent='draft' tabindex='-1' {about}>{''.join(shown)}</tr>"


def _far_before(line: TableLine, find: str) -> str:
    """Returns HTML that names a searched text which stands before the text that the line shows; "" for another."""
    tokens = (line.drafted_token, line.committed_token)
    if any(searchable(find) in searchable(line.text_before) + searchable(token or "") for token in tokens):
        return ""
    return f"<small>“{markup(shorten(plain(find), _WIDTH))}” stands before: </small>"


def _text_around(tables: RunTables, line: TableLine) -> str:
    """Returns HTML: the text before a rejected draft token, the token, the committed one, and the text after."""
    request = tables.run.request(line.request_id)
    start = line.position + 1 - len(request["prompt_token_ids"])
    ids = request["committed_token_ids"][start : start + TOKENS_AROUND]
    after = plain("".join(text_of(tables.run.token_texts, token) for token in ids))
    before = shorten(plain(line.text_before or "")[::-1], _WIDTH)[::-1]
    # white space is shown as signs: a space alone that is struck out would look like a hyphen
    drafted, committed = (
        markup(token_label(text if isinstance(text, str) else "", _WIDTH))
        for text in (line.drafted_token, line.committed_token)
    )
    return f"{markup(before)}<del>{drafted}</del><ins>{committed}</ins>{markup(shorten(after, _WIDTH))}"
