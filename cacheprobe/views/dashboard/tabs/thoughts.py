"""Shows a Thinking States model's thoughts about each chunk of a request, and one chunk in numbers."""

from cacheprobe.views.dashboard.questions import PageQuestion, number
from cacheprobe.views.dashboard.shelf import Shelf
from cacheprobe.views.diagrams.cards import chunk_parts
from cacheprobe.views.text import markup
from cacheprobe.views.thoughts.columns import story_of
from cacheprobe.views.thoughts.picture import thoughts_block


def view(shelf: Shelf, question: PageQuestion) -> str:
    """Returns HTML: the picture of the thoughts about each chunk, and the chosen chunk in numbers; a note if the run or
    the request has no thoughts."""
    book, request = shelf.book_and_request(question)
    thoughts = book.run.thoughts
    if thoughts is None:
        remedy = "Only a Thinking States model thinks while it reads; <code>cacheprobe demo</code> leaves a run of one."
        return f"<h2>{markup(book.name)} wrote no thoughts</h2><p class='note'>{remedy}</p>"
    if request not in set(thoughts.request_id):
        return f"<h2>Request {request} wrote no thoughts</h2><p class='note'>It has no whole chunk.</p>"
    story = story_of(thoughts, book.rows_of(request), book.events_of(request), request, book.run.token_texts)
    last = int(book.events_of(request).step.max())
    picture = thoughts_block(story, book.ledger(request, last), book.run.meta["thinking"])
    step = None if question.get("step") is None else number(question["step"], "step")
    thinking = book.run.meta["thinking"] or {}
    title, card = chunk_parts(story, number(question["position"], "position"), thinking, step)
    return f"{picture}<h3>{markup(title)}</h3>{card}"
