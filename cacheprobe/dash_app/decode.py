"""The grid of requests by generated tokens at the chosen step."""

from cacheprobe.dash_app.asking import Ask, number, span, whole
from cacheprobe.dash_app.shelf import Shelf
from cacheprobe.dash_app.timeline import MOST_REQUESTS
from cacheprobe.views.decode_grid import GRID_LEGEND, STATES_LEGEND, decode_grid
from cacheprobe.views.timeline import key

MOST_TOKENS = 40


def view(shelf: Shelf, ask: Ask) -> str:
    book = shelf.book(ask["run"])
    count = len(book.run.requests)
    requests = span(ask["requests"], "requests", MOST_REQUESTS)
    requests = range(requests.start, min(requests.stop, count))
    places = span(ask["places"], "places", MOST_TOKENS)
    step, chosen = number(ask["step"], "step"), whole(ask["request"], "request", count)
    standing = book.standing(requests, step)
    picture = decode_grid(
        standing, requests, places, book.run.token_texts, verified=book.verified,
        chosen=(chosen, number(ask["place"], "place")), step=step,
    )  # fmt: skip
    own = standing[standing.request_id == chosen].state.value_counts()
    done = int(own.get("committed", 0) + own.get("pending", 0))
    said = [f"{done} token{'s' * (done != 1)} committed"]
    if waiting := own.get("candidate", 0):
        said.append(f"{waiting} still candidates")
    # not those that still stand: in place of the first one stands what was recovered
    history = book.history
    lost = (history.request_id == chosen) & (history.settled == step) & (history.outcome == "rolled_back")
    if lost.any():
        said.append(f"{lost.sum()} rolled back now")
    return (
        f"<h2>After step {step}, request {chosen} has {', '.join(said)}</h2>"
        "<p class='note'>Generated tokens by request; texture tells how close the two best tokens were when it was "
        f"chosen. A bold edge: new in this step.</p><div class='scroll'>{picture}</div>"
        f"{key(STATES_LEGEND)}{key(GRID_LEGEND)}"
    )
