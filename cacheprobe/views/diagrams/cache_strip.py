"""Draws the cache slots of one request one by one after a step, lists the passes that wrote them, and writes a sentence
on the cache memory of all requests."""

from collections.abc import Sequence
from itertools import groupby

import pandas as pd

from cacheprobe.views.diagrams import svg
from cacheprobe.views.diagrams.cylinder import PROVENANCE_STYLES
from cacheprobe.views.diagrams.windows import Window
from cacheprobe.views.lens_table import runs_of
from cacheprobe.views.text import markup

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
        slots = f"slot {first}" if first == last else f"slots {first} to {last}"
        written = f"written in step {written_step}"
        if provenance == "pending":
            written = "its token is committed, and the slot not written yet"
        tip = f"{owner}{slots}: {provenance}, {written}"
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
    passes = sorted({*written, *removed})
    num_skipped = max(len(passes) - _MOST_PASSES, 0)
    lines = []
    for i, (at, kind) in enumerate(passes):
        if 1 <= i <= num_skipped:
            if i == 1:
                lines.append(f'<tr><td colspan="4">… {num_skipped} pass{"es" * (num_skipped != 1)}</td></tr>')
            continue
        texts = [_ranges(where.get((at, kind), [])) for where in (written, removed)]
        chosen = " chosen" if at == step else ""
        cells = (
            f'<td class="number">{at}</td><td>{markup(kind)}</td><td>{texts[0]}</td><td class="lost">{texts[1]}</td>'
        )
        lines.append(f'<tr class="pick{chosen}" data-step="{at}">{cells}</tr>')
    head = '<th class="number">step</th><th>pass</th><th>wrote and kept</th><th>rolled back</th>'
    return f'<table class="passes"><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table>'


def _ranges(positions: list[int]) -> str:
    return ", ".join(str(low) if low == high else f"{low} to {high}" for low, high in runs_of(positions))


def memory_sentence(
    own_slots: int, all_slots: int, num_requests: int, capacity: int, slot_bytes: int | None, *, has_ended: bool = False
) -> str:
    """Returns a sentence, as escaped text, on the cache after a step: how many of its `capacity` slots one request
    uses, and how many slots all requests use; and, if `slot_bytes` is known, the bytes of all these slots and of
    one slot.

    has_ended: the request has ended by this step; `own_slots` is then the number at its end.
    """
    own_part = (
        f"This request has ended, and freed its {own_slots} slots"
        if has_ended
        else f"{own_slots} of {capacity} slots of this request are in use"
    )
    counts = f"{own_part}; {all_slots} slots of {num_requests} request{'s' * (num_requests != 1)} are in use"
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
