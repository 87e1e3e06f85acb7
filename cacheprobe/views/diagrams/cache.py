"""Draws the KV cache of one request: a cylinder with its slots by provenance (the kind of pass that wrote a slot), a
strip with a cell for each slot, and the passes that wrote them."""

from collections.abc import Iterable, Sequence
from itertools import groupby

import pandas as pd

from cacheprobe.analysis.windows import Window
from cacheprobe.views.diagrams import svg
from cacheprobe.views.diagrams.frame import Markup
from cacheprobe.views.text import counted, markup, runs_of, stretch


def cache_picture(
    ledger: pd.DataFrame,
    *,
    request_id: int | None = None,
    step: int | None = None,
    pending: int | None = None,
    truncated: int = 0,
    has_ended: bool = False,
    windows: Sequence[Window] = (),
    memory: str = "",
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
    windows: the request's verify windows, from `find_windows`: the table also has what their passes removed again.
    memory: a sentence about the cache of all requests, as HTML, shown below the table.
    Raises: ValueError for a ledger without lines, or with an unknown provenance.  Source: figure of LLM-42 (arXiv
    2601.17768).
    """
    owner = "the request" if request_id is None else f"request {request_id}"
    if ledger.empty:
        raise ValueError(f"the ledger is empty: {owner} holds no cache slots then; give a step at which it does")
    when = "at its end" if has_ended else "" if step is None else f"after step {step}"
    cylinder = cylinder_strokes(["KV cache", *filter(None, [when])], ledger, step=step, truncated=truncated)
    picture = svg.picture(290, CACHE_HEIGHT + 8, f"KV cache of {owner} {when}", cylinder, style="max-width:290px")
    strip = cache_strip(ledger, request_id=request_id, step=step, pending=pending)
    slots = counted(len(ledger), "cache slot")
    held = f"has ended and freed its {slots}" if has_ended else f"holds {slots} {when}".rstrip()
    parts = ", ".join(f"{number} {name}" for name, number in cache_counts(ledger).items())
    about = ""
    if step is not None:
        about = "Underlined: written in this step. A verify pass writes the slots of its drafts anew; the passes that "
        about += "drafted are not listed."
    note = " ".join(filter(None, (about, memory)))
    body = f"<div class='cylinder'>{picture}</div><h4>Slot by slot</h4>{strip}{cache_passes(ledger, windows, step)}"
    body += f"<p class='note'>{note}</p>" if note else ""
    return Markup.of(f"{owner[0].upper()}{owner[1:]} {held}: {parts}", body)


PROVENANCE_STYLES: dict[str, tuple[str, str | None]] = {
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
    bands = []
    for name, count in counts.items():
        lines = count if count <= 8 and name != "prefill" else 0
        tip = _band_tip(ledger, name, count)
        bands.append((*PROVENANCE_STYLES[name], _band_height(name, count), lines, tip))
    title, parts = list(title), [svg.cylinder(12, 16, _CYLINDER_WIDTH, bands)]
    parts += [svg.text(112, 18 + 16 * i, line, "strong") for i, line in enumerate(title)]
    y = 18 + 16 * len(title)
    parts.append(svg.text(112, y + 2, counted(slots, "slot")))
    y += 12
    for name, count in counts.items():
        colour, texture = PROVENANCE_STYLES[name]
        parts.append(svg.swatch(112, y, colour, texture))
        label = f"{count} {'rolled back' if name == 'truncated' else name}"
        if name == "verified" and 0 < (now := written_now.get(name, 0)) < count:
            label += f" ({now} now)"
        parts.append(svg.text(136, y + 11, label, "red-ink" if colour == "gone" else ""))
        y += 20
    return parts


def _band_tip(ledger: pd.DataFrame, name: str, count: int) -> str:
    """Returns the hover text of the cylinder's band with this provenance (`name`): the number of its slots, their
    positions, and the steps that wrote them."""
    number = counted(count, "cache slot")
    if name == "truncated":
        return f"{number} rolled back in this step"
    slots = ledger[ledger.provenance == name]
    positions, steps = (stretch(unit, slots[unit].min(), slots[unit].max()) for unit in ("position", "step"))
    return f"{number}: {name}, {positions}, written in {steps}"


def _band_height(name: str, slots: int) -> float:
    """Returns the height in pixels, not to scale, of the cylinder's band with this provenance (`name`)."""
    if name == "prefill":
        return 56
    return min(slots * 9, 34 if name in ("verified", "decoded") else 30)


_PITCH, _HEIGHT, _LINE = 9, 18, 34
_MOST_PASSES = 12
_PASSES = {"verified": "verify", "provisional": "draft", "decoded": "decode"}


def cache_strip(
    ledger: pd.DataFrame,
    *,
    request_id: int | None = None,
    step: int | None = None,
    pending: int | None = None,
    per_line: int = 48,
) -> str:
    """Returns SVG text: a cell for each cache slot of one request in order of position, coloured by provenance (the
    kind of pass that wrote the slot), in lines of `per_line` cells. Neighbouring slots of one line, one provenance and
    one step are one shape, whose hover text names the step.

    ledger: from `Trace.ledger`, after a step.  request_id: named in the hover texts.  step: slots that this step wrote
    are underlined.  pending: position of the committed token whose slot is not written yet, drawn hatched.
    """
    cells = list(zip(ledger.position.tolist(), ledger.provenance, ledger.step.tolist(), strict=True))
    if pending is not None:
        cells.append((pending, "pending", -1))
    owner = "" if request_id is None else f"request {request_id}, "
    parts: list[str] = []
    lines = 1
    in_one_shape = groupby(cells, key=lambda cell: (cell[0] // per_line, *cell[1:]))
    for (line, provenance, written_step), neighbours in in_one_shape:
        positions = [cell[0] for cell in neighbours]
        first, last = positions[0], positions[-1]
        x, y = _PITCH * (first % per_line), _LINE * line
        width = _PITCH * (last - first + 1)
        colour, texture = ("green", "pending") if provenance == "pending" else PROVENANCE_STYLES[provenance]
        written = f"written in step {written_step}"
        if provenance == "pending":
            written = "its token is committed, and the slot not written yet"
        tip = f"{owner}{stretch('slot', first, last)}: {provenance}, {written}"
        parts.append(svg.box(x + 0.5, y + 2, width - 1, _HEIGHT, colour, texture, radius=3, tip=tip))
        ticks = "".join(f"M{x + _PITCH * i} {y + 5}v{_HEIGHT - 6}" for i in range(1, last - first + 1))
        if ticks:
            parts.append(f'<path d="{ticks}" class="{colour}-stroke" fill="none" opacity=".35" pointer-events="none"/>')
        if written_step == step:
            parts.append(f'<path d="M{x + 2} {y + 24.5}H{x + width - 2}" class="written"/>')
        lines = max(lines, line + 1)
    width, height = _PITCH * per_line + 1, _LINE * lines
    label = f"{len(ledger)} cache slots by provenance"
    return svg.picture(width, height, label, parts, style=f"max-width:{width * 1.25:.0f}px")


def cache_passes(ledger: pd.DataFrame, windows: Sequence[Window] = (), step: int | None = None) -> str:
    """Returns HTML of a table with a line for each pass that wrote cache slots which one request still holds, or that
    removed slots again: its step, its kind, the positions written and kept, and the positions removed. A line carries
    data-step. Of a longer list, the first line and the last 11 are shown.

    ledger: from `Trace.ledger`, after a step.  windows: the request's verify windows; those of later steps are left
    out.  step: its line is marked.
    """
    written = {
        (int(at), _PASSES.get(str(kind), str(kind))): sorted(slots.position.tolist())
        for (at, kind), slots in ledger.groupby(["step", "provenance"])
    }
    first, last = int(ledger.step.min()), int(ledger.step.max()) if step is None else step
    removed = {
        (window.step, "verify"): list(window.truncated_positions)
        for window in windows
        if first <= window.step <= last and window.num_truncated
    }
    passes, lines = sorted({*written, *removed}), []
    for at, kind in passes:
        runs = (runs_of(where.get((at, kind), [])) for where in (written, removed))
        kept, gone = (", ".join(str(a) if a == b else f"{a} to {b}" for a, b in of) for of in runs)
        chosen = " chosen" if at == step else ""
        cells = f'<td class="number">{at}</td><td>{markup(kind)}</td><td>{kept}</td><td class="lost">{gone}</td>'
        lines.append(f'<tr class="pick{chosen}" data-step="{at}">{cells}</tr>')
    if (num_skipped := len(lines) - _MOST_PASSES) > 0:
        lines[1 : 1 + num_skipped] = [f'<tr><td colspan="4">… {counted(num_skipped, "pass")}</td></tr>']
    head = '<th class="number">step</th><th>pass</th><th>wrote and kept</th><th>rolled back</th>'
    return f'<table class="passes"><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table>'


def memory_sentence(
    own_slots: int, all_slots: int, num_requests: int, capacity: int, slot_bytes: int | None, *, has_ended: bool = False
) -> str:
    """Returns a sentence, as escaped text, on the cache after a step: how many of its `capacity` slots one request
    uses, and how many slots all requests use; and, if `slot_bytes` is known, the bytes of all these slots and of
    one slot.

    has_ended: the request has ended by this step; `own_slots` is then the number at its end.
    """
    own_part = f"{own_slots} of {capacity} slots of this request are in use"
    if has_ended:
        own_part = f"This request has ended, and freed its {own_slots} slots"
    counts = f"{own_part}; {all_slots} slots of {counted(num_requests, 'request')} are in use"
    if slot_bytes is None:
        return markup(f"{counts}. The run does not say how large a slot is.")
    size = slot_bytes * all_slots
    return markup(f"{counts}, {_bytes_text(size)} of keys and values ({_bytes_text(slot_bytes)} a slot).")


def _bytes_text(count: int) -> str:
    """Returns a number of bytes as text with a unit, such as "1.5 MiB"."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
