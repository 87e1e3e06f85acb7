"""Shows the run step by step: one page of requests and steps."""

import pandas as pd

from cacheprobe.views.dashboard.questions import PageQuestion, number, requests_of, span
from cacheprobe.views.dashboard.shelf import Shelf
from cacheprobe.views.diagrams.timeline import (
    MOST_REQUESTS,
    MOST_STEPS,
    PITCH,
    WIDEST,
    ZOOMED_PITCH,
    timeline_picture,
    timeline_piece,
)


def view(shelf: Shelf, question: PageQuestion) -> str:
    """Returns HTML of the timeline: requests by steps, for the requests and steps of the page's question. zoomed: the
    steps were chosen, and fill the width."""
    book = shelf.book(question["run"])
    all_requests = range(len(book.run.requests))
    requests = requests_of(question, book.by_losses, MOST_REQUESTS)
    is_zoomed = question.get("zoomed") is True
    steps = span(question["steps"], "steps", MOST_ZOOMED if is_zoomed else MOST_STEPS)
    steps = range(steps.start, min(steps.stop, book.steps.stop))
    # in a run that grows, steps have one width, however many there are, unless they were chosen
    width = 0 if "growing" in book.run.meta and not is_zoomed else number(question["width"], "width")
    pitches = ZOOMED_PITCH if is_zoomed else (PITCH, WIDEST)
    note = " Sorted by the number of tokens rolled back, most first." if question.get("order") == "losses" else ""
    note += " A cell is one pass of one request; click one. Drag over steps to zoom."
    picture = timeline_picture(book.events_of_all(requests), requests, steps, width=width, pitches=pitches)
    return timeline_piece(picture, requests, steps, all_requests, book.steps, book.finding, note).html


MOST_ZOOMED = 240
"""Largest number of steps in a zoomed timeline; state.js has it too."""
MOST_PARTS = 400
"""Largest number of parts that the overview cuts a run into."""


def overview(shelf: Shelf, question: PageQuestion) -> str:
    """Returns HTML of the whole run as a strip, below the slider of steps: by steps, the shares of draft tokens that
    were accepted (green) and rolled back (red); blue where no draft was judged. The page moves the frame of class
    "shown" over the steps of the timeline."""
    book = shelf.book(question["run"])
    events, steps = book.run.events, book.steps
    per_part = max(-(-len(steps) // MOST_PARTS), 1)
    judged = events[events.num_accepted.notna()]
    counts = pd.DataFrame({
        "part": (judged.step - steps.start) // per_part,
        "drafted": judged.draft_token_ids.map(len),
        "accepted": judged.num_accepted.astype(int),
    }).groupby("part").sum()  # fmt: skip
    parts = [f'<rect class="fill-blue" x="{steps.start}" y="0" width="{len(steps)}" height="10"/>']
    for part, (drafted, accepted) in zip(counts.index, counts.to_numpy().tolist(), strict=True):
        if not drafted:
            continue
        first, high = int(part) * per_part, 10 * accepted / drafted
        at, width = steps.start + first, min(per_part, len(steps) - first)
        parts.append(f'<rect class="fill-red" x="{at}" y="0" width="{width}" height="{10 - high:.2f}"/>')
        parts.append(f'<rect class="fill-green" x="{at}" y="{10 - high:.2f}" width="{width}" height="{high:.2f}"/>')
    parts.append('<rect class="shown" y="0" width="0" height="10"/>')
    label = "draft tokens by step: green accepted, red rolled back"
    box = f'viewBox="{steps.start} 0 {max(len(steps), 1)} 10" preserveAspectRatio="none"'
    return f'<svg {box} role="img" aria-label="{label}"><title>{label}</title>{"".join(parts)}</svg>'
