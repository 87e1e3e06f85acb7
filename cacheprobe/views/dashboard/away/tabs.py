"""Tables and code of the tabs beside the replay, and of the search for edits."""

import pandas as pd

from cacheprobe.views.dashboard.away.taken import Sources, Taken, directory_of, opened, opened_with_model
from cacheprobe.views.dashboard.book import Book
from cacheprobe.views.dashboard.questions import CannotShow, PageQuestion, number
from cacheprobe.views.dashboard.rejections import SORTS, Range, searchable
from cacheprobe.views.dashboard.tabs import rejected
from cacheprobe.views.text import text_of


def thoughts(sources: Sources, question: PageQuestion) -> Taken:
    """Takes the thoughts about the chunks of a request."""
    book, request = sources.shelf.book_and_request(question)
    found = book.run.thoughts
    if found is None or request not in set(found.request_id):
        raise CannotShow(f"request {request} of {book.name} wrote no thoughts")
    code = [
        *opened(book),
        "thoughts = trace.thoughts()",
        f"table = thoughts[thoughts.request_id == {request}]",
        f"cp.plots.thoughts_picture(thoughts, trace.rows(), trace.events(), trace.ledger({request}), {request}, "
        'thinking=trace.meta["thinking"], token_texts=trace.token_texts)',
    ]
    return Taken(lambda: found[found.request_id == request], code)


def rejected_drafts(sources: Sources, question: PageQuestion) -> Taken:
    """Takes the list of rejected drafts, as it is searched, filtered and sorted; all its pages."""
    book, selection = rejected.selected(sources.shelf, question)
    rejections = book.rejections
    code = [*opened(book), "table = trace.rejected()"]
    if selection.request is not None:
        code += [f"table = table[table.request_id == {selection.request}]"]
    if selection.drafter is not None:
        code += [f"table = table[table.drafter_layer.fillna(-1) == {selection.drafter}]"]
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
    if isinstance(selection.flips, str):
        code += ["table = table[table.flip_layer.isna()]"]
    else:
        code += _within("flip_layer", "flip_layer", selection.flips)
    code += _within("margin_at_least_nats", "margin_nats", selection.margin)
    if selection.sort:
        column = SORTS[selection.sort.removeprefix("-")]
        key = ', key=lambda texts: texts.str.replace("␣", " ").str.casefold()' if column.endswith("token") else ""
        is_rising = not selection.sort.startswith("-")
        code += [f'table = table.sort_values({column!r}, kind="stable", ascending={is_rising}{key})']
    return Taken(lambda: rejections.table(rejections.lines(selection)), [*code, "table"])


def _within(low: str, high: str, limits: Range | None) -> list[str]:
    """Returns the lines of Python that keep a range: of column `low` from its least on, of `high` up to its most."""
    if limits is None:
        return []
    least, most = limits
    lines = [f"table = table[table.{low}.notna()]"]
    lines += [] if least is None else [f"table = table[(table.{low} >= {least}).fillna(False)]"]
    return lines + ([] if most is None else [f"table = table[(table.{high} <= {most}).fillna(False)]"])


def compare(sources: Sources, question: PageQuestion) -> Taken:
    """Takes the generated tokens of one request in two runs, side by side."""
    book, request = sources.shelf.book_and_request(question)
    other = sources.shelf.book(question["against"])

    def table() -> pd.DataFrame:
        """Returns a line for each place: token ids and texts of both runs."""
        pair = [_committed(one, request) for one in (book, other)]
        columns = {"token_id": pair[0], "token": _texts(pair[0], book)}
        columns |= {"token_id_theirs": pair[1], "token_theirs": _texts(pair[1], other)}
        return pd.DataFrame(columns).rename_axis("place").reset_index()

    code = [
        "import pandas as pd",
        *opened(book, "ours"),
        f"theirs = cp.load_trace({directory_of(other)!r})",
        f"pair = [pd.Series(trace.tokens.get({request}, []), dtype='Int64') for trace in (ours, theirs)]",
        "columns = {'token_id': pair[0], 'token': pair[0].map(ours.token_texts)}",
        "columns |= {'token_id_theirs': pair[1], 'token_theirs': pair[1].map(theirs.token_texts)}",
        "table = pd.DataFrame(columns).rename_axis('place').reset_index()",
        f"cp.plots.comparison((ours.rows(), theirs.rows()), (ours.events(), theirs.events()), {request}, "
        f"names={(book.name, other.name)!r}, fingerprints=(ours.fingerprint, theirs.fingerprint), "
        "token_texts=(ours.token_texts, theirs.token_texts))",
    ]
    return Taken(table, code)


def _committed(book: Book, request: int) -> pd.Series:
    """Returns the ids of the tokens that a request generated; none if the run lacks it."""
    there = request < len(book.run.requests)
    return pd.Series(book.run.request(request)["committed_token_ids"] if there else [], dtype="Int64")


def _texts(token_ids: pd.Series, book: Book) -> pd.Series:
    return token_ids.map(lambda token: text_of(book.run.token_texts, token)).astype(object)


def flip(sources: Sources, question: PageQuestion) -> Taken:
    """Takes the result of the search for edits that would have flipped a verdict."""
    shelf, _, jobs = sources
    book, request = shelf.book_and_request(question)
    step = number(question["step"], "step")
    job = jobs.look((book.run.directory, book.run.run_id, request, step))
    if job is None or job.table is None:
        raise CannotShow(f"request {request} step {step}: no result of this search yet")
    found = job.table
    code = [
        *opened_with_model(shelf, book),
        f"found = cp.analysis.flip(trace, {request}, {step})  # cacheprobe/analysis/flips.py",
        "table = found.table",
        "found.plot()",
    ]
    return Taken(lambda: found, code)
