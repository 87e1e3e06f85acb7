"""Lists the rejected drafts of a run, and finds the next or previous one from a chosen place."""

import math
import re

import pandas as pd

from cacheprobe.core.values import JsonDict, TableLine
from cacheprobe.trace.tables.rejected import TOKENS_AROUND
from cacheprobe.views.dashboard.book import Book
from cacheprobe.views.dashboard.facts import request_story, why_none_rejected
from cacheprobe.views.dashboard.questions import CannotShow, PageQuestion, number, whole
from cacheprobe.views.dashboard.rejections import LINES_A_PAGE, SORTS, Range, Selection, searchable
from cacheprobe.views.dashboard.shelf import Shelf
from cacheprobe.views.report.rejections import FLIP_WORDS, flip_of, margin_of, quoted
from cacheprobe.views.text import markup, plain, shorten, text_of, token_label

MOST_LETTERS = 200
"""Largest length of a searched text."""
_WIDTH = 28
"""Largest width of the text on one side of a token, in columns of a monospaced font."""
_HEADS = {
    "drafted": "drafted",
    "committed": "committed",
    "request": "request",
    "step": "step",
    "position": "position",
    "drafter": "drafter’s layer",
    "flip": "committed first from layer",
    "margin": "margin, nats",
}
"""Heads of the columns, by the key in SORTS."""
_NUMBERS = ("request", "step", "position", "drafter", "flip", "margin")


def view(shelf: Shelf, question: PageQuestion) -> str:
    """Returns HTML: one page of the list of rejected drafts, with the search, the filter and the pages. A line carries
    data-request, data-step and data-position: those of the row that predicts the drafted token. A sentence, if no draft
    was rejected."""
    book, selection = selected(shelf, question)
    rejections = book.rejections
    if rejections.drafts.empty:
        return _without_rejections(book)
    lines = rejections.lines(selection)
    last_page = max(math.ceil(len(lines) / LINES_A_PAGE) - 1, 0)
    page = 0 if question.get("page") is None else min(max(number(question["page"], "page"), 0), last_page)
    shown = rejections.table(lines[page * LINES_A_PAGE : (page + 1) * LINES_A_PAGE])
    body = "".join(_line(book, line, selection.find) for line in shown.itertuples())
    rejections.read_ahead()
    return (
        f"<h2>{markup(_finding(rejections.drafts))}</h2><p class='note'>{_note(book)}</p>"
        f"{_finder(selection)}{_filters(book)}{_pages(len(lines), page, last_page)}"
        f"{_left_out(*rejections.left_out(selection))}"
        + (f"<div class='scroll'><table class='rejected'>{_head(selection.sort)}<tbody>{body}</tbody></table></div>"
           if len(lines) else f"<p class='refused'>{markup(_nothing_found(selection))}</p>")
    )  # fmt: skip


def walk(shelf: Shelf, question: PageQuestion) -> JsonDict:
    """Returns the rejected draft that is question["by"] lines on in the list from a place, as a dict: request, step,
    position (of the row that predicts the drafted token), page of the list, and for another request story, what
    `facts.request_story` returns of it, which the page needs next. If there is none: says, a sentence.

    question: request, step and position of the place, which a row predicts; and what the list holds, as for `view`.
    """
    among = {**question, "request": question.get("among")}
    book, selection = selected(shelf, among)
    by, step = number(question["by"], "by"), number(question["step"], "step")
    if not by:
        raise CannotShow("by is a number other than 0")
    request = whole(question["request"], "request", len(book.run.requests))
    place = (request, step, number(question["position"], "position") + 1)
    target = book.rejections.walk(selection, place, by)
    if target is None:
        if book.rejections.drafts.empty:
            return {"says": "no draft of this run was rejected"}
        limits = " in the list as it is searched, sorted or filtered" if selection != Selection() else ""
        return {"says": f"there is no rejected draft {'after' if by > 0 else 'before'} this place{limits}"}
    line = book.rejections.drafts.iloc[book.rejections.lines(selection)[target]]
    found = int(line.request_id)
    return {
        "request": found,
        "step": int(line.step),
        "position": int(line.position) - 1,
        "page": target // LINES_A_PAGE,
        **({} if found == request else {"story": request_story(shelf, {"run": question["run"], "request": found})}),
    }


def selected(shelf: Shelf, question: PageQuestion) -> tuple[Book, Selection]:
    """Returns (Book of the run, Selection) that a question names. Raises: CannotShow for values of other kinds."""
    book = shelf.book(question["run"])
    find, sort, request = (question.get(name) for name in ("find", "sort", "request"))
    if not isinstance(find or "", str) or len(find or "") > MOST_LETTERS:
        raise CannotShow(f"a searched text has at most {MOST_LETTERS} letters")
    if sort and (not isinstance(sort, str) or sort.removeprefix("-") not in SORTS):
        raise CannotShow(f"the list is sorted by {', '.join(SORTS)}, got {sort!r:.40}")
    if request is not None:
        request = whole(request, "request", len(book.run.requests))
    drafter, flips, margin = (question.get(name) or None for name in ("drafter", "flips", "margin"))
    if drafter is not None and not (isinstance(drafter, str) and re.fullmatch(r"none|[0-9]{1,9}", drafter)):
        raise CannotShow(f"the drafter’s layer is a number or none, got {drafter!r:.40}")
    layer = None if drafter is None else -1 if drafter == "none" else int(drafter)
    flip_range = flips if flips == "none" else _range(flips, "flips")
    return book, Selection(find or "", sort or "", request, layer, flip_range, _range(margin, "margin"))


def _range(value: object, what: str) -> Range | None:
    """Returns (least, most) of a text "LEAST:MOST", where either can be missing; None for None. Raises: CannotShow for
    anything else."""
    if value is None:
        return None
    try:
        assert isinstance(value, str)
        ends = [float(end) if end else None for end in value.split(":")]
        least, most = ends
    except (AssertionError, ValueError):
        raise CannotShow(f"{what} is LEAST:MOST, such as 2:5, 2: or :5, got {value!r:.40}") from None
    return least, most


def _finding(drafts: pd.DataFrame) -> str:
    count, num_requests = len(drafts), drafts.request_id.nunique()
    of_requests = f"in {num_requests:,} request{'s' * (num_requests != 1)}"
    return f"{count:,} draft{'s were' if count != 1 else ' was'} rejected, {of_requests}"


def _without_rejections(book: Book) -> str:
    """Returns HTML that says why a run has no rejected draft."""
    so_far = " so far" if "growing" in book.run.meta else ""
    why = why_none_rejected(book)
    note = markup(f"{why[0].upper()}{why[1:]}.")
    return f"<h2>No draft of {markup(book.name)} was rejected{so_far}</h2><p class='note'>{note}</p>"


def _note(book: Book) -> str:
    """Returns HTML: what a line is, and what the run lacks."""
    said = "A line is the first token of a draft that the verifier did not choose; a click or Enter opens it. "
    if book.run.has_readings:
        return said + (
            f"{FLIP_WORDS} The margin is how much more log-probability the last layer gives to the committed token "
            "(“&gt;”: the drafted token is not among the top tokens read)."
        )
    why = 'read no lens yet (<code>lens="later"</code>)' if book.run.is_unread else "recorded no lens readings (Z)"
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


def _filters(book: Book) -> str:
    """Returns HTML of the filters by layer and margin. The page's script sets their values."""
    layers = book.rejections.drafts.drafter_layer
    options = [f"<option>{layer}</option>" for layer in sorted(layers.dropna().astype(int).unique().tolist())]
    options += ["<option value='none'>none</option>"] if layers.isna().any() else []

    def ends(name: str, says: str, rule: str) -> str:
        """Returns two boxes for the least and the most of a range."""
        boxes = (
            f"<input type='number' {rule} data-filter='{name} {i}' aria-label='{says}, {end}' placeholder='{end}'>"
            for i, end in enumerate(("least", "most"))
        )
        return f"<span>{says} {' to '.join(boxes)}</span>"

    boxes = ends("flips", _HEADS["flip"], "min='0' step='1'") + ends("margin", _HEADS["margin"], "step='any'")
    return (
        "<div class='filters'><label>drafter’s layer <select data-filter='drafter'><option value=''>any</option>"
        f"{''.join(options)}</select></label>{boxes if book.run.has_readings else ''}"
        "<button class='plain' data-intent='unfiltered'>show all</button></div>"
    )


def _pages(count: int, page: int, last_page: int) -> str:
    """Returns HTML: which lines are shown, and buttons to the other pages."""
    first, last = page * LINES_A_PAGE + 1, min((page + 1) * LINES_A_PAGE, count)
    says = f"{first:,} to {last:,} of {count:,}" if count > 1 else _lines(count)

    def button(name: str, sign: str, to: int) -> str:
        """Returns a button to a page; one that cannot be used if it is no other page."""
        unusable = "" if 0 <= to <= last_page and to != page else " disabled"
        return f"<button class='icon' title='{name}' data-intent='page' data-page='{to}'{unusable}>{sign}</button>"

    buttons = [button("first page", "«", 0), button("previous page", "‹", page - 1)]
    buttons += [button("next page", "›", page + 1), button("last page", "»", last_page)]
    shown = "".join(buttons) if last_page else ""
    return f"<div class='pages'><span role='status'>{says}</span>{shown}</div>"


def _left_out(num_without_layer: int, num_without_margin: int) -> str:
    """Returns HTML: how many lines are not in the list because they lack the number that a range compares; "" if
    none."""
    lists = "<button class='plain' data-intent='filter' data-name='flips' data-value='none'>list them</button>"
    said = [f"{_lines(num_without_layer)} without such a layer {lists}"] if num_without_layer else []
    said += [f"{_lines(num_without_margin)} of whose margin only the least is known"] if num_without_margin else []
    return f"<p class='note'>Not in this list: {'; '.join(said)}.</p>" if said else ""


def _lines(count: int) -> str:
    return f"{count:,} line{'s' * (count != 1)}"


def _head(sort: str) -> str:
    """Returns HTML of the line of heads, which sort the list."""
    cells = []
    for key, name in _HEADS.items():
        is_sorted, side = sort.removeprefix("-") == key, " class='number'" if key in _NUMBERS else ""
        order = f" aria-sort='{'descending' if sort.startswith('-') else 'ascending'}'" if is_sorted else ""
        sign = (" ▼" if sort.startswith("-") else " ▲") if is_sorted else ""
        cells.append(f"<th{side}{order}><button data-intent='sort' data-sort='{key}'>{name}{sign}</button></th>")
    return f"<thead><tr>{''.join(cells)}<th>text around</th></tr></thead>"


def _line(book: Book, line: TableLine, find: str) -> str:
    """Returns HTML of one line of the list. find: the text that was searched for."""
    numbers = {"request": line.request_id, "step": line.step, "position": line.position}
    drafter = "—" if pd.isna(line.drafter_layer) else int(line.drafter_layer)
    cells: dict[str, object] = {**numbers, "drafter": drafter, "flip": flip_of(line), "margin": margin_of(line)}
    shown = [
        f"<td class='drafted'>{markup(quoted(line.drafted_token))}</td>",
        f"<td class='committed'>{markup(quoted(line.committed_token))}</td>",
        *(f"<td class='number' data-name='{_HEADS[key]}'>{markup(str(cells[key]))}</td>" for key in _NUMBERS),
        f"<td class='around'>{_far_before(line, find)}{_text_around(book, line)}</td>",
    ]
    about = f"data-request='{line.request_id}' data-step='{line.step}' data-position='{line.position - 1}'"
    return f"<tr data-intent='draft' tabindex='-1' {about}>{''.join(shown)}</tr>"


def _far_before(line: TableLine, find: str) -> str:
    """Returns HTML that names a searched text which stands before the text that the line shows; "" for another."""
    near = (
        searchable(line.text_before) + searchable(token or "") for token in (line.drafted_token, line.committed_token)
    )
    if any(searchable(find) in text for text in near):
        return ""
    return f"<small>“{markup(shorten(plain(find), _WIDTH))}” stands before: </small>"


def _text_around(book: Book, line: TableLine) -> str:
    """Returns HTML: the text before a rejected draft token, the token, the committed one, and the text after."""
    request = book.run.request(line.request_id)
    start = line.position + 1 - len(request["prompt_token_ids"])
    ids = request["committed_token_ids"][start : start + TOKENS_AROUND]
    after = "".join(text_of(book.run.token_texts, token) for token in ids)
    before = _cut(line.text_before, keeps_end=True)
    return f"{before}<del>{_token(line.drafted_token)}</del><ins>{_token(line.committed_token)}</ins>{_cut(after)}"


def _token(text: object) -> str:
    """Returns a token with its white space as signs: a space alone that is struck out would look like a hyphen."""
    return markup(token_label(text if isinstance(text, str) else "", _WIDTH))


def _cut(text: str | None, *, keeps_end: bool = False) -> str:
    """Returns a text with visible control characters, cut to a width at its end or at its beginning, and escaped; ""
    for None."""
    if not text:
        return ""
    shown = plain(text)
    return markup(shorten(shown[::-1], _WIDTH)[::-1] if keeps_end else shorten(shown, _WIDTH))
