"""Draws the KV cache of one request: a cylinder with its slots by provenance (the kind of pass that wrote a slot), a
strip with a cell for each slot, and the passes that wrote them."""

from collections.abc import Sequence

import pandas as pd

from cacheprobe.views.diagrams import svg
from cacheprobe.views.diagrams.cache_strip import cache_passes, cache_strip
from cacheprobe.views.diagrams.cylinder import CACHE_HEIGHT, cache_counts, cylinder_strokes
from cacheprobe.views.diagrams.frame import Markup, TitledPicture
from cacheprobe.views.diagrams.windows import Window


def cache_picture(
    ledger: pd.DataFrame,
    *,
    request_id: int | None = None,
    step: int | None = None,
    pending: int | None = None,
    truncated: int = 0,
    has_ended: bool = False,
) -> Markup:
    """Returns HTML of one request's cache slots: a cylinder with their counts, a strip with a cell for each slot, and a
    table of the passes that wrote them. Colours show the pass that wrote a slot: blue prefill, yellow draft
    (provisional), green verify, grey decode of a never verified request.

    Hover texts name the step that wrote a slot. An edited slot is grey with crosses.
    ledger: trace.ledger(request_id, step).  request_id, step: named in the picture; slots that the step wrote are
    underlined.  pending: position of a committed token whose slot is not written yet, drawn hatched.
    truncated: number of slots that the step removed again, drawn below the cylinder as an outline;
    `Window.num_truncated` counts them.  has_ended: the request has ended by then, and its slots are free; drawn are
    those that it held at its end.
    Raises: ValueError for a ledger without lines, or with an unknown provenance.  Source: figure of LLM-42 (arXiv
    2601.17768).
    """
    return cache_piece(
        ledger, "", request_id=request_id, step=step, pending=pending, truncated=truncated, has_ended=has_ended
    ).alone


def cache_piece(
    ledger: pd.DataFrame,
    memory: str,
    *,
    request_id: int | None,
    step: int | None,
    pending: int | None = None,
    truncated: int = 0,
    has_ended: bool = False,
    windows: Sequence[Window] = (),
) -> TitledPicture:
    """Returns the picture of one request's cache slots as a `TitledPicture` (title, note, HTML body), for a page that
    has the styles; `cache_picture` explains the other arguments. memory: HTML on the cache of all requests for the
    note, or "".  windows: of the request; the table also has what their passes removed again.
    Raises: ValueError for an empty ledger or an unknown provenance."""
    owner = "the request" if request_id is None else f"request {request_id}"
    if ledger.empty:
        raise ValueError(f"the ledger is empty: {owner} holds no cache slots then; give a step at which it does")
    when = "at its end" if has_ended else "" if step is None else f"after step {step}"
    cylinder = cylinder_strokes(["KV cache", *filter(None, [when])], ledger, step=step, truncated=truncated)
    picture = svg.picture(290, CACHE_HEIGHT + 8, f"KV cache of {owner} {when}", cylinder, style="max-width:290px")
    strip = cache_strip(ledger, request_id=request_id, step=step, pending=pending)
    slots = f"{len(ledger)} cache slot{'s' * (len(ledger) != 1)}"
    held = f"has ended and freed its {slots}" if has_ended else f"holds {slots} {when}".rstrip()
    parts = ", ".join(f"{number} {name}" for name, number in cache_counts(ledger).items())
    about = ""
    if step is not None:
        about = "Underlined: written in this step. A verify pass writes the slots of its drafts anew; the passes that "
        about += "drafted are not listed."
    note = " ".join(filter(None, (about, memory)))
    return TitledPicture(
        f"{owner[0].upper()}{owner[1:]} {held}: {parts}",
        "",
        f"<div class='cylinder'>{picture}</div><h4>Slot by slot</h4>{strip}"
        f"{cache_passes(ledger, windows, step)}" + (f"<p class='note'>{note}</p>" if note else ""),
    )
