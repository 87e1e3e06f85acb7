"""Draws the decode panel: the token T0, the tokens drafted or decoded after T0, and the grid of requests by these
tokens."""

from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd

from cacheprobe.views.diagrams import svg
from cacheprobe.views.diagrams.cylinder import CACHE_HEIGHT, cylinder_strokes
from cacheprobe.views.diagrams.panels import WIDTH, Panel, abridged, step_note, token_tip

SETTLED_NATS, CONTESTED_NATS = 2.0, 0.5
"""Margins in nats between the two most likely tokens: a cell is plain from the first number on, and dotted below the
second."""
_MOST_REQUESTS = 8


class PanelToken(NamedTuple):
    """Holds one token of the decode panel: its name (such as T1), text, step and position."""

    name: str
    text: str
    step: int | None
    """Step that drafted or committed the token; None if the token was committed before the window."""
    position: int


def decode_panel(
    events: pd.DataFrame, request_id: int, ledger: pd.DataFrame, newest: PanelToken, columns: Sequence[PanelToken],
    *, is_verified: bool = True,
) -> Panel:  # fmt: skip
    """Returns the `Panel` (heading, picture, sentence) of a request's decode phase: the cache, the committed token T0
    (`newest`), and the tokens drafted or decoded after T0 (`columns`). Below is a grid of requests by these tokens;
    textures show the margin between the two most likely tokens.

    is_verified: False if the request's tokens are committed as they are decoded; they are then grey.
    """
    colour, texture = ("yellow", "provisional") if is_verified else ("grey", None)
    kind = "draft token" if is_verified else "committed as decoded"
    shown = abridged(len(columns), 4)
    gap = 6
    width = min((WIDTH - 80 - 8 - gap * (len(shown) - 1)) / max(len(shown), 1), 60)
    places_of_tokens = [(80 + place * (width + gap), index) for place, index in enumerate(shown)]
    top = CACHE_HEIGHT + 14
    parts = cylinder_strokes(["KV cache", "after decode"], ledger)
    parts.append(
        svg.chip(8, top, 64, "T₀", newest.text, "green", tip=token_tip(request_id, newest.position, "committed"))
    )
    for x, index in places_of_tokens:
        if index < 0:
            parts.append(svg.text(x + width / 2, top + 24, f"+ {-index}", "muted", "middle"))
            continue
        token = columns[index]
        tip = token_tip(request_id, token.position, kind, token.step)
        parts.append(svg.chip(x, top, width, token.name, token.text, colour, texture, tip=tip))
    steps = [columns[index].step if index >= 0 else None for index in shown]
    grid, height = _grid(events, request_id, steps, [x for x, _ in places_of_tokens], width, top + 54, colour)
    count = len(columns)
    if is_verified and count:
        draft_tokens = f"{count} draft token{'s' * (count != 1)}"
        sentence = f"The fast path or drafter proposed {draft_tokens}; the slots it wrote are provisional."
    elif is_verified:
        sentence = "Nothing was drafted: the verifier alone chose the next token."
    else:
        sentence = "This request is never verified: each token is committed as it is decoded, and its cache slots stay."
    note = step_note([token.step for token in columns if token.step is not None])
    label = f"Decode: T0 and {count} tokens {kind}"
    return Panel("Decode", note, svg.picture(WIDTH, height, label, parts + grid), sentence)


def _grid(
    events: pd.DataFrame,
    request_id: int,
    steps: Sequence[int | None],
    places: Sequence[float],
    width: float,
    top: float,
    colour: str,
) -> tuple[list[str], float]:
    """Returns (SVG elements, y of their lower end): a grid of requests by tokens, whose textures show each token's
    top-two margin in nats, with a legend."""
    if not places:
        return [], top
    passes = events[events.step.isin([step for step in steps if step is not None])]
    others = sorted(set(passes.request_id.tolist()) - {request_id})
    margins = passes.set_index(["request_id", "step"]).margin_nats
    parts, y = [], top
    for row in [request_id, *others[: _MOST_REQUESTS - 1]]:
        parts.append(svg.text(8, y + 13, f"request {row}", "small strong" if row == request_id else "small muted"))
        tint = colour if row == request_id else "grey"
        for x, step in zip(places, steps, strict=True):
            if step is None or (row, step) not in margins.index:
                continue
            margin = margins[row, step]
            is_known = bool(pd.notna(margin))
            margin_words = f"{margin:.2f} nats between its two best tokens" if is_known else "no model pass"
            tip = f"request {row}, step {step}: {margin_words}"
            parts.append(svg.box(x, y, width, 18, tint, margin_texture(margin, tint), radius=3, tip=tip))
        y += 22
    if more := len(others[_MOST_REQUESTS - 1 :]):
        parts.append(svg.text(8, y + 12, f"and {more} more", "small muted"))
        y += 20
    y += 18
    parts.append(svg.text(8, y, "top-two margin, nats", "small muted"))
    keys = [
        (SETTLED_NATS, f"≥ {SETTLED_NATS:g}"),
        ((SETTLED_NATS + CONTESTED_NATS) / 2, "between"),
        (0.0, f"< {CONTESTED_NATS:g}"),
    ]
    for i, (margin, label) in enumerate(keys):
        x = 8 + i * 88
        parts.append(svg.box(x, y + 8, 26, 13, "grey", margin_texture(margin, "grey"), radius=3))
        parts.append(svg.text(x + 32, y + 19, label, "small muted"))
    return parts, y + 26


def margin_texture(margin: float, colour: str) -> str | None:
    """Returns the name of a cell's texture for a margin in nats between the two most likely tokens: None from 2 nats on
    or for an unknown margin (NaN), "crossed-COLOUR" from 0.5 nats on, else "dotted-COLOUR". colour: yellow, green or
    grey."""
    if pd.isna(margin) or margin >= SETTLED_NATS:
        return None
    return f"crossed-{colour}" if margin >= CONTESTED_NATS else f"dotted-{colour}"
