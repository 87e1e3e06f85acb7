"""The picture of one verify window from a real run: prefill, decode, verify, then rollback or none."""

from collections.abc import Mapping, Sequence

import pandas as pd

from cacheprobe.views import svg
from cacheprobe.views.cache_picture import swatch
from cacheprobe.views.decode_panel import decode_panel
from cacheprobe.views.panels import Panel, outcome_panel, prefill_panel, token_name, verify_panel
from cacheprobe.views.style import DIAGRAM_CSS
from cacheprobe.views.text import text_of
from cacheprobe.views.windows import Window

_LEGEND = (
    ("blue", None, None, "prefill"),
    ("yellow", "provisional", None, "candidate, provisional row"),
    ("green", None, "check", "accepted"),
    ("green", "verified", None, "verified row"),
    ("green", "pending", None, "pending: committed, row not written yet"),
    ("red", None, "cross", "rejected"),
    ("grey", None, None, "other requests"),
)


class Markup(str):
    """A piece of HTML that a notebook shows as a picture."""

    def _repr_html_(self) -> str:
        return str(self)


def window_diagram(
    window: Window,
    events: pd.DataFrame,
    ledgers: Sequence[pd.DataFrame],
    token_texts: Mapping[int, str],
    *,
    is_deterministic: bool = False,
) -> Markup:
    """One verify window as four panels, each an SVG of its own, which stack where there is no room beside each other.

    window: one of `find_windows(trace.events(), request_id)`.  events: the same table, for the other requests.
    ledgers: [trace.ledger(request_id, step) for step in window.ledger_steps].  token_texts: as from `token_texts`.
    Source: figure of LLM-42 (arXiv 2601.17768), prefill, decode, verify, roll back.
    """
    panels = window_phases(window, events, ledgers, token_texts, is_deterministic=is_deterministic)
    return Markup(framed(side_by_side(panels)))


def framed(panels: str) -> str:
    """Panels with the styles, textures and legend that they need to stand alone."""
    return f'<div class="cp"><style>{DIAGRAM_CSS}</style>{svg.TEXTURES}{panels}{legend()}</div>'


def window_phases(
    window: Window,
    events: pd.DataFrame,
    ledgers: Sequence[pd.DataFrame],
    token_texts: Mapping[int, str],
    *,
    is_deterministic: bool = False,
) -> list[Panel]:
    """The panels of `window_diagram`, in order."""
    after_prefill, after_decode, after_verify = ledgers
    drafted = [
        (token_name(i + 1, candidate=True), text_of(token_texts, token_id), step)
        for i, (token_id, step) in enumerate(zip(window.draft_token_ids, window.decode_steps, strict=True))
    ]
    newest = text_of(token_texts, window.newest_token_id)
    name = "deterministic request" if is_deterministic else f"request {window.request_id}"
    return [
        prefill_panel(events, window.request_id, after_prefill, name),
        decode_panel(events, window.request_id, after_decode, newest, drafted),
        verify_panel(window, token_texts),
        outcome_panel(window, after_verify, token_texts),
    ]


def decoded_phases(
    request_id: int, events: pd.DataFrame, ledgers: Sequence[pd.DataFrame], token_texts: Mapping[int, str]
) -> list[Panel]:
    """Prefill and decode of a request that is never verified.

    ledgers: after its last prefill step, and at its end.
    """
    after_prefill, after_decode = ledgers
    own = events[events.request_id == request_id]
    # one that gave way was read again, and that pass committed nothing
    first = next(int(ids[-1]) for ids in own[own.phase == "prefill"].committed_token_ids if len(ids))
    decoded = [
        (int(token_id), int(event.step))
        for event in own[own.phase == "decode"].itertuples()
        for token_id in event.committed_token_ids
    ]
    columns = [(token_name(i + 1), text_of(token_texts, token_id), step) for i, (token_id, step) in enumerate(decoded)]
    return [
        prefill_panel(events, request_id, after_prefill, f"request {request_id}"),
        decode_panel(events, request_id, after_decode, text_of(token_texts, first), columns, is_verified=False),
    ]


def side_by_side(panels: Sequence[Panel]) -> str:
    """Panels as HTML without styles and legend, for a page that has them."""
    return f'<div class="panels">{"".join(panel.html for panel in panels)}</div>'


def legend() -> str:
    """What each colour, texture and sign means, as HTML."""
    return key_list(keys())


def key_list(listed: Sequence[tuple[str, str]]) -> str:
    """Keys and their meanings as an HTML list."""
    items = [f'<li><svg viewBox="0 0 26 18" aria-hidden="true">{drawn}</svg>{said}</li>' for drawn, said in listed]
    return f'<ul class="legend">{"".join(items)}</ul>'


def keys() -> list[tuple[str, str]]:
    """The strokes of each colour, texture and sign, within 26 x 18 px, and what they mean."""
    items = []
    for colour, texture, sign, meaning in _LEGEND:
        drawn = swatch(1, 2, colour, texture) + (svg.mark(10, 8.5, sign, 0.7) if sign else "")
        items.append((drawn, meaning))
    return [*items, (svg.mark(9, 9, "turn"), "recovered"), (svg.mark(9, 9, "plus"), "bonus")]
