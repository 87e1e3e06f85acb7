"""Shows the run step by step: requests by steps, the whole run as a strip, and requests by generated tokens."""

from functools import cached_property

import pandas as pd

from cacheprobe.trace.tables.token_history import tokens_with_texts
from cacheprobe.views.dashboard.export import opened
from cacheprobe.views.dashboard.questions import PageQuestion, number, requests_of, span
from cacheprobe.views.dashboard.run_list import RunList
from cacheprobe.views.dashboard.view import View
from cacheprobe.views.diagrams.decode_grid import decode_piece
from cacheprobe.views.diagrams.timeline import (
    MOST_REQUESTS,
    MOST_STEPS,
    PITCH,
    WIDEST,
    ZOOMED_PITCH,
    timeline_picture,
    timeline_piece,
)

MOST_TOKENS = 40
MOST_ZOOMED = 240
"""Largest number of steps in a zoomed timeline; state.js has it too."""
MOST_PARTS = 400
"""Largest number of parts that the overview cuts a run into."""


class _OfRequests(View):
    """A view that shows some requests, one below the other."""

    @cached_property
    def requests(self) -> list[int]:
        """Ids of the requests of the page."""
        return requests_of(self.question, self.tables.by_losses, MOST_REQUESTS)


class Timeline(_OfRequests):
    """One page of the timeline: the passes of some requests in some steps. zoomed: the steps were chosen, and fill the
    width."""

    @cached_property
    def steps(self) -> range:
        """Steps of the page."""
        steps = span(self.question["steps"], "steps", MOST_ZOOMED if self.is_zoomed else MOST_STEPS)
        return range(steps.start, min(steps.stop, self.tables.steps.stop))

    @property
    def is_zoomed(self) -> bool:
        """Whether the steps were chosen."""
        return self.question.get("zoomed") is True

    def draw(self) -> str:
        """Returns HTML of the timeline: requests by steps."""
        run, requests = self.tables.run, self.requests
        # in a run that grows, steps have one width, however many there are, unless they were chosen
        width = 0 if "growing" in run.meta and not self.is_zoomed else number(self.question["width"], "width")
        pitches = ZOOMED_PITCH if self.is_zoomed else (PITCH, WIDEST)
        is_sorted = self.question.get("order") == "losses"
        note = " Sorted by the number of tokens rolled back, most first." if is_sorted else ""
        note += " A cell is one pass of one request; click one. Drag over steps to zoom."
        events, all_requests = self.tables.events_of_all(requests), range(len(run.requests))
        picture = timeline_picture(events, requests, self.steps, width=width, pitches=pitches)
        finding, all_steps = self.tables.finding, self.tables.steps
        return timeline_piece(picture, requests, self.steps, all_requests, all_steps, finding, note).html

    def table(self) -> pd.DataFrame:
        """Returns the lines of the events table of these requests and steps."""
        events = self.tables.run.events
        return events[events.request_id.isin(self.requests) & events.step.isin(self.steps)]

    def code(self) -> list[str]:
        """Returns the code of the timeline."""
        return [
            *opened(self.tables),
            "events = trace.events()",
            f"table = events[events.request_id.isin({self.requests}) & events.step.isin({self.steps})]",
            f"cp.plots.timeline(events, requests={self.requests}, steps={self.steps})",
        ]


def overview(run_list: RunList, question: PageQuestion) -> str:
    """Returns HTML of the whole run as a strip, below the slider of steps: by steps, the shares of draft tokens that
    were accepted (green) and rolled back (red); blue where no draft was judged. The page moves the frame of class
    "shown" over the steps of the timeline."""
    tables = run_list.tables(question["run"])
    events, steps = tables.run.events, tables.steps
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


class TokenGrid(_OfRequests):
    """The grid of requests by generated tokens after the chosen step."""

    @cached_property
    def places(self) -> range:
        """Indices of the generated tokens of the page."""
        return span(self.question["places"], "places", MOST_TOKENS)

    @property
    def chosen(self) -> tuple[int, int]:
        """The chosen request, and the index of its chosen token."""
        return self.request, number(self.question["place"], "place")

    def draw(self) -> str:
        """Returns HTML of the grid: a line for each request, a cell for each committed or drafted token."""
        tables = self.tables
        return decode_piece(
            tables.history_of(self.request), tables.tokens_after(self.requests, self.step), self.requests, self.places,
            self.step, tables.run.token_texts, verified=tables.verified, chosen=self.chosen,
        ).html  # fmt: skip

    def table(self) -> pd.DataFrame:
        """Returns the lines of `cp.analysis.tokens_at` in the cells."""
        tokens = tokens_with_texts(self.tables.tokens_after(self.requests, self.step), self.tables.run.token_texts)
        return tokens[tokens.place.isin(self.places)]

    def code(self) -> list[str]:
        """Returns the code of the grid."""
        return [
            *opened(self.tables),
            f"table = cp.analysis.tokens_at(trace, {self.step})",
            f"table = table[table.request_id.isin({self.requests}) & table.place.isin({self.places})]",
            f"cp.plots.decode_grid(trace.events(), {self.step}, trace.token_texts, requests={self.requests}, "
            f"places={self.places}, chosen={self.chosen})",
        ]
