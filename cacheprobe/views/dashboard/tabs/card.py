"""Shows one row as a card (each layer's most likely tokens, and the verdict on the draft token at the next position),
and as a sentence."""

from cacheprobe.analysis.measures import prediction_depth
from cacheprobe.core.hook_names import site_label
from cacheprobe.core.records import DISCARDED_DRAFT
from cacheprobe.trace.tables.token_history import outcomes_at, outcomes_of_row
from cacheprobe.views.dashboard.book import Book
from cacheprobe.views.dashboard.questions import CannotShow, PageQuestion, number, one_of
from cacheprobe.views.dashboard.reader import RunReader
from cacheprobe.views.dashboard.shelf import Shelf
from cacheprobe.views.dashboard.tabs.flip import buttons
from cacheprobe.views.dashboard.tabs.lens import chosen_row, readings_of
from cacheprobe.views.dashboard.tokenizers import texts_of
from cacheprobe.views.diagrams.cards import card_parts
from cacheprobe.views.lens_table import reads_and_predicts
from cacheprobe.views.report.insight import insight, insight_in_vain
from cacheprobe.views.text import markup


def view(shelf: Shelf, reader: RunReader, question: PageQuestion) -> str:
    """Returns HTML of the card of one row of the trace: each layer's most likely tokens, the prediction depth, and the
    tokens drafted and committed at the next position. Raises: CannotShow if the row does not exist, or if no reading of
    the row was kept or can be computed."""
    book, request = shelf.book_and_request(question)
    site = one_of(question["site"], "site", ("S", "T", "C"))
    row = chosen_row(book, request, number(question["position"], "position"), question.get("row"))
    position = int(row.position)
    table = readings_of(book, reader, question["lens"], site, request, range(position, position + 1), int(row.row))
    if table.empty:
        raise CannotShow(f"no reading of request {request} at position {position} was kept; widen the capture filters")
    table = table[table.site != "thought"]
    shown_ids = {int(i) for top in table.top_token_ids for i in top}
    known_texts = book.run.token_texts
    missing = shown_ids - set(known_texts)
    texts = {**texts_of(book.run.fingerprint["model"], missing), **reader.token_texts(book, missing), **known_texts}
    generated_index = position + 1 - book.prompt_length(request)
    history = book.history_of(request)
    outcomes = outcomes_at(history, generated_index)
    if question.get("row") is not None:
        outcomes = outcomes_of_row(outcomes, int(row.step))
    title, body = card_parts(table, prediction_depth(table).iloc[0].to_dict(), outcomes, texts, row.token)
    is_edited = row.status not in DISCARDED_DRAFT and book.run.fingerprint.get("path") != "thinking"
    flips = buttons(question, history, generated_index, outcomes) if is_edited else ""
    return f"<h3>{markup(title)}</h3>{body}{_features(book, request, int(row.row))}{flips}"


def _features(book: Book, request: int, row: int) -> str:
    """Returns HTML of the features that were recorded of a row, the largest first; a click colours the text by one. ""
    for a run without recorded features."""
    if book.run.features is None:
        return ""
    lines = book.features_of(request)
    lines = lines[lines.row == row].sort_values("rank")
    about = book.run.meta["capture"]["dictionary"]
    head = f"<h4>Features of {site_label(about['site'])}, layer {about['layer']}</h4>"
    if lines.empty:
        return f"{head}<p class='note'>No feature is active in this row.</p>"
    buttons = "".join(
        f'<li><button class="plain" data-intent="feature" data-feature="{line.feature}">{line.feature}</button> '
        f"{line.activation:.2f}</li>"
        for line in lines.itertuples()
    )
    return f'{head}<ul class="features">{buttons}</ul><p class="note">Click one: it colours the text.</p>'


def sentence(shelf: Shelf, question: PageQuestion) -> str:
    """Returns HTML: a sentence on the position that a row predicts: the draft tokens, their verdicts, the committed
    token, and the layers that predicted each token in the recorded readings. For a row that was fed a rejected or
    given-up draft token: that token, and the last layer's first choice."""
    book, request = shelf.book_and_request(question)
    position, rows = number(question["position"], "position"), book.rows_of(request)
    row = None if question.get("row") is None else chosen_row(book, request, position, question["row"])
    position = position if row is None else int(row.position)
    table = book.run.events.iloc[:0]
    if book.run.has_readings:
        table = book.readings(request, range(position, position + 1))
        table = table[
            ((table.status == "committed") if row is None else (table.row == row.row)) & (table.site != "thought")
        ]
    if row is not None and row.status in DISCARDED_DRAFT:
        text = insight_in_vain(table, row)
    else:
        outcomes = outcomes_at(book.history_of(request), position + 1 - book.prompt_length(request))
        step = None if row is None else int(row.step)
        text = insight(table, rows[rows.position == position], outcomes, book.run.token_texts, step=step)
    about_row = reads_and_predicts(position)
    if row is not None and row.status != "committed":
        about_row = f"{row.status.replace('_', ' ')} row, step {row.step}, {about_row}"
    return f"<b>{about_row[0].upper()}{about_row[1:]}:</b> {markup(text)}."
