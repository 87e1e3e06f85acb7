"""Draws the KV cache of one request as a cylinder, with the number of slots of each provenance (the kind of pass that
wrote a slot)."""

from collections.abc import Iterable

import pandas as pd

from cacheprobe.views.diagrams import svg

PROVENANCE_STYLES = {
    "prefill": ("blue", None),
    "edited": ("grey", "crossed-grey"),
    "decoded": ("grey", None),
    "verified": ("green", "verified"),
    "provisional": ("yellow", "provisional"),
    "truncated": ("gone", None),
}
"""Colour and texture of each provenance of a cache slot, from the top of the cylinder down."""

CACHE_HEIGHT = 158
_CYLINDER_WIDTH = 84


def cache_counts(ledger: pd.DataFrame) -> dict[str, int]:
    """Returns a dict from provenance (the kind of pass that wrote a cache slot) to the number of such slots in the
    ledger, without zeros. Raises: ValueError for an unknown provenance."""
    counts = ledger.provenance.value_counts()
    if unknown := set(counts.index) - set(PROVENANCE_STYLES):
        raise ValueError(f"unknown provenance {sorted(unknown)[0]!r}; known are {', '.join(PROVENANCE_STYLES)}")
    return {name: int(counts[name]) for name in PROVENANCE_STYLES if name in counts.index}


def cylinder_strokes(
    title: Iterable[str], ledger: pd.DataFrame, *, step: int | None = None, truncated: int = 0
) -> list[str]:
    """Returns a list of SVG elements: the cache as a cylinder with a band for each provenance (the kind of pass that
    wrote a slot), and the number of slots of each band as a legend. The hover text of a band names the steps that wrote
    its slots.

    title: lines of text above the counts.  step: the count of verified slots also says how many of them this step
    wrote, unless it wrote all or none.  truncated: number of slots that were removed again, drawn as an outline below
    the cylinder.
    """
    counts = cache_counts(ledger)
    written_now = {} if step is None else cache_counts(ledger[ledger.step == step])
    slots = sum(counts.values())
    if truncated:
        counts["truncated"] = truncated
    bands = [
        svg.Band(
            colour=PROVENANCE_STYLES[name][0],
            texture=PROVENANCE_STYLES[name][1],
            height=_band_height(name, count),
            slots=count if count <= 8 and name != "prefill" else 0,
            tip=_band_tip(ledger, name, count),
        )
        for name, count in counts.items()
    ]
    parts = [svg.cylinder(12, 16, _CYLINDER_WIDTH, bands)]
    y = 18.0
    for line in title:
        parts.append(svg.text(112, y, line, "strong"))
        y += 16
    parts.append(svg.text(112, y + 2, f"{slots} slot{'s' * (slots != 1)}"))
    y += 12
    for name, count in counts.items():
        colour, texture = PROVENANCE_STYLES[name]
        parts.append(swatch(112, y, colour, texture))
        label = f"{count} {'rolled back' if name == 'truncated' else name}"
        if name == "verified" and 0 < (now := written_now.get(name, 0)) < count:
            label += f" ({now} now)"
        parts.append(svg.text(136, y + 11, label, "red-ink" if colour == "gone" else ""))
        y += 20
    return parts


def swatch(x: float, y: float, colour: str, texture: str | None) -> str:
    """Returns SVG of a box of 18 x 13 px with one colour and texture, for a legend; the colour "gone" gives a dashed
    red outline."""
    if colour == "gone":
        return f'<rect x="{x:g}" y="{y:g}" width="18" height="13" rx="3" class="box red-stroke gone"/>'
    return svg.box(x, y, 18, 13, colour, texture, radius=3)


def _band_tip(ledger: pd.DataFrame, name: str, count: int) -> str:
    """Returns the hover text of the cylinder's band with this provenance (`name`): the number of its slots, their
    positions, and the steps that wrote them."""
    number = f"{count} cache slot{'s' * (count != 1)}"
    if name == "truncated":
        return f"{number} rolled back in this step"
    slots = ledger[ledger.provenance == name]
    ranges = [
        f"{unit} {low}" if low == high else f"{unit}s {low} to {high}"
        for unit, low, high in (
            ("position", int(slots.position.min()), int(slots.position.max())),
            ("step", int(slots.step.min()), int(slots.step.max())),
        )
    ]
    return f"{number}: {name}, {ranges[0]}, written in {ranges[1]}"


def _band_height(name: str, slots: int) -> float:
    """Returns the height in pixels, not to scale, of the cylinder's band with this provenance (`name`)."""
    if name == "prefill":
        return 56
    return min(slots * 9, 34 if name in ("verified", "decoded") else 30)
