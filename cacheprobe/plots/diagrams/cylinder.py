"""Draws the KV cache of one request as a cylinder, with its rows counted beside it."""

from collections.abc import Iterable

import pandas as pd

from cacheprobe.plots.diagrams import svg

PROVENANCE_STYLES = {
    "prefill": ("blue", None),
    "edited": ("grey", "crossed-grey"),
    "decoded": ("grey", None),
    "verified": ("green", "verified"),
    "provisional": ("yellow", "provisional"),
    "truncated": ("gone", None),
}
"""Colour and texture of each provenance, from the top of the cylinder down."""

CACHE_HEIGHT = 158
_WIDTH = 84


def cache_counts(ledger: pd.DataFrame) -> dict[str, int]:
    """Returns the number of cache rows by provenance, without zeros. Raises: ValueError for an unknown provenance."""
    counts = ledger.provenance.value_counts()
    if unknown := set(counts.index) - set(PROVENANCE_STYLES):
        raise ValueError(f"unknown provenance {sorted(unknown)[0]!r}; known are {', '.join(PROVENANCE_STYLES)}")
    return {name: int(counts[name]) for name in PROVENANCE_STYLES if name in counts.index}


def cylinder_strokes(
    title: Iterable[str], ledger: pd.DataFrame, *, step: int | None = None, truncated: int = 0
) -> list[str]:
    """Returns the strokes of cylinder and counts, within 280 x CACHE_HEIGHT px.

    title: its lines.  step: rows written by this step are counted separately.  truncated: rows that were removed again,
    drawn below the cylinder as an outline. The tip of a band names the steps that wrote its rows.
    """
    counts = cache_counts(ledger)
    new = {} if step is None else cache_counts(ledger[ledger.step == step])
    rows = sum(counts.values())
    if truncated:
        counts["truncated"] = truncated
    bands = [
        svg.Band(
            colour=PROVENANCE_STYLES[name][0],
            texture=PROVENANCE_STYLES[name][1],
            height=_height(name, count),
            rows=count if count <= 8 and name != "prefill" else 0,
            tip=_band_tip(ledger, name, count),
        )
        for name, count in counts.items()
    ]
    parts = [svg.cylinder(12, 16, _WIDTH, bands)]
    y = 18.0
    for line in title:
        parts.append(svg.text(112, y, line, "strong"))
        y += 16
    parts.append(svg.text(112, y + 2, f"{rows} row{'s' * (rows != 1)}"))
    y += 12
    for name, count in counts.items():
        colour, texture = PROVENANCE_STYLES[name]
        parts.append(swatch(112, y, colour, texture))
        label = f"{count} {name}"
        if name == "verified" and 0 < (now := new.get(name, 0)) < count:
            label += f" ({now} now)"
        parts.append(svg.text(136, y + 11, label, "red-ink" if colour == "gone" else ""))
        y += 20
    return parts


def swatch(x: float, y: float, colour: str, texture: str | None) -> str:
    """Returns a small box of one colour and texture."""
    if colour == "gone":
        return f'<rect x="{x:g}" y="{y:g}" width="18" height="13" rx="3" class="box red-stroke gone"/>'
    return svg.box(x, y, 18, 13, colour, texture, radius=3)


def _band_tip(ledger: pd.DataFrame, name: str, count: int) -> str:
    """Returns the tip of a band: positions of its rows, and the steps that wrote them."""
    rows = f"{count} cache row{'s' * (count != 1)}"
    if name == "truncated":
        return f"{rows} cut off again in this step"
    own = ledger[ledger.provenance == name]
    spans = [
        f"{what} {low}" if low == high else f"{what}s {low} to {high}"
        for what, low, high in (
            ("position", int(own.position.min()), int(own.position.max())),
            ("step", int(own.step.min()), int(own.step.max())),
        )
    ]
    return f"{rows}: {name}, {spans[0]}, written in {spans[1]}"


def _height(name: str, rows: int) -> float:
    """Returns the height of a band, not to scale, so that three rows are visible beside a long prompt."""
    if name == "prefill":
        return 56
    return min(rows * 9, 34 if name in ("verified", "decoded") else 30)
