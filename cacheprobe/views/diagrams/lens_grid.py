"""Draws the lens grid as SVG: layers upwards, positions across, with each layer's most likely token and a mark on the
committed token."""

from typing import Literal, SupportsIndex

import numpy as np
import pandas as pd

from cacheprobe.core.hook_names import site_label
from cacheprobe.core.records import DISCARDED_DRAFT
from cacheprobe.core.values import TableLine
from cacheprobe.trace.tables.draft_verdicts import drafter_layers
from cacheprobe.views.diagrams import svg
from cacheprobe.views.diagrams.frame import Drawing, Markup, legend, picture_alone
from cacheprobe.views.style import SHADES
from cacheprobe.views.text import columns_of as width_of
from cacheprobe.views.text import markup, runs_of, token_label, visible

Measure = Literal["logprob", "entropy", "rank"]
Include = Literal["committed", "all"]

TOKEN_COLUMNS = 6
"""Largest width of a token in a cell or below a column, in columns of a monospaced font."""
SIGNS = {"committed": "", "superseded": "◇ ", "rolled_back": "✗ ", "abandoned": "⊘ "}
MARKS = {
    "superseded": "◇ computed again by the verifier",
    "rolled_back": "✗ fed a rejected token or one after it",
    "abandoned": "⊘ fed a draft that was abandoned",
}
NOTHING_TO_COMPARE = "fed a draft that was never committed, so no committed token can be compared with it"
NOT_COMPARED = "not compared with a committed token"
"""Text of the legend for grey cells: the row was rolled back or abandoned, or no next token was committed."""
BELOW = "position, token read → token to predict, the one committed next"
"""Text that explains the lines below a column of the grid, which `column_label` makes."""
DRAFTER_LAYER = " ▸ The drafter’s layer: the draft token is first there by construction."
"""Sentence that explains the mark before the number of the layer at which an early-exit drafter drafts."""
FLOOR_NATS = -12.0
"""Log-probabilities below this value, in nats, share one colour."""
_RANKS = (0, 9, 99, 999, 9999)


def reads_and_predicts(position: SupportsIndex) -> str:
    """Returns text such as "reads position 7, predicts 8": the position of a row's input token, and of the token that
    the row predicts."""
    return f"reads position {int(position)}, predicts {int(position) + 1}"


def column_words(column: TableLine) -> str:
    """Returns text on one row of the trace, not escaped, such as "read 2 → predicts 4": its input token and the token
    committed next (not what the row predicted). The text says so instead if no token was committed next, or if the row
    was fed a rejected draft token, one after it, or an abandoned one.

    column: a line of the hypotheses table.
    """
    read = f"read {visible(column.read_token)}"
    if column.status in DISCARDED_DRAFT:
        is_rolled_back = column.status == "rolled_back"
        return f"{read}, {'a rejected token or one after it' if is_rolled_back else 'a draft that was abandoned'}"
    if pd.isna(column.committed_token):
        return f"{read}, nothing committed next"
    return f"{read} → predicts {visible(column.committed_token)}"


def column_label(column: TableLine, letters: int = TOKEN_COLUMNS) -> tuple[str, str, str]:
    """Returns the three lines of text below a column of the lens grid: the mark of the row's status (◇ superseded, ✗
    rolled back, ⊘ abandoned; none if committed) with the position; the input token; and "→" with the token committed
    next. Each token is cut to the width of `letters` monospaced characters, and not escaped.

    A dash replaces the next token if none was committed, or if the row was rolled back or abandoned.
    column: a line of the hypotheses table.
    """
    has_no_next = pd.isna(column.committed_token) or column.status in DISCARDED_DRAFT
    next_token = "—" if has_no_next else token_label(column.committed_token, letters)
    arrow = "→ " if width_of(next_token) < letters else "→"
    read = token_label(column.read_token, letters)
    return f"{SIGNS[column.status]}{column.position}", read, f"{arrow}{next_token}"


Scale = tuple[str, pd.Series, list[tuple[float, str]]]
"""(title; share of the strongest colour for each reading, NaN for a grey cell; (share, label) of each tick)."""


def scale_of(rows: pd.DataFrame, colour: Measure) -> Scale:
    """Returns the `Scale` that colours these lens readings. colour: "logprob" of the committed token (nats), "entropy"
    (nats; the lowest is strongest), or "rank" of the committed token (0, the first choice, is strongest; by
    log10(rank + 1)).

    A reading without a committed token has a number only for the entropy, and so has a row that was rolled back or
    abandoned, because no committed token can be compared with the row.
    Raises: ValueError for another colour.
    """
    is_comparable = rows["rank"].notna() & ~rows.status.isin(DISCARDED_DRAFT)
    if colour == "logprob":
        title, weak, strong = "log p of the committed token (nats)", FLOOR_NATS, 0.0
        values = rows.committed_logprob_nats.astype(float).where(is_comparable)
        ticks = [(weak, "≤ −12"), *((t, f"−{-t:g}") for t in (-9.0, -6.0, -3.0)), (strong, "0")]
    elif colour == "entropy":
        title, values = "entropy (nats)", rows.entropy_nats.astype(float)
        weak, strong = max(float(values.max()), 1e-9) if values.notna().any() else 1.0, 0.0
        ticks = [(float(t), f"{t:g}") for t in np.linspace(0, np.floor(weak), 3)] if weak >= 2 else [(0.0, "0")]
    elif colour == "rank":
        title, weak, strong = "rank of the committed token", np.log10(_RANKS[-1] + 1), 0.0
        rank = rows["rank"].where(is_comparable).astype("Float64").to_numpy(dtype=float, na_value=np.nan)
        values = pd.Series(np.log10(rank + 1), index=rows.index)
        ticks = [(float(np.log10(t + 1)), str(t)) for t in _RANKS]
    else:
        raise ValueError(f"unknown colour {colour!r}; it is 'logprob', 'entropy' or 'rank'")
    length = strong - weak
    return title, ((values - weak) / length).clip(0, 1), [((t - weak) / length, name) for t, name in ticks]


def finding(rows: pd.DataFrame, request_id: int) -> str:
    """Returns a sentence, as plain text, on one request's committed rows: the median layer from which the most likely
    token stays the committed one. If half of these rows or more have no such layer, or no row has a committed token,
    the sentence says so instead. rows: lens readings of the request."""
    comparable = rows[(rows.status == "committed") & rows.agrees.notna()]
    if comparable.empty:
        return f"Request {request_id}: no committed token to compare with"
    read = comparable.sort_values("layer", ascending=False)
    stays = read.agrees.astype(bool).groupby(read.row).cummin()
    median = read.layer.astype(float).where(stays, np.inf).groupby(read.row).min().median()
    if median == np.inf:
        return f"Request {request_id}: at half of the positions or more, no layer settles on the committed token"
    return f"Request {request_id}: the committed token is the first choice from layer {median:g} on (median)"


def select(hypotheses: pd.DataFrame, request_id: int, include: Include, positions: range | None) -> pd.DataFrame:
    """Returns a DataFrame: the lines of the hypotheses table of one request, at `positions` (None for all). include:
    "committed" for committed rows, "all" for every row. Raises: ValueError if no line is left, or for another
    `include`."""
    if include not in ("committed", "all"):
        raise ValueError(f"unknown include {include!r}; it is 'committed' or 'all'")
    of_request = hypotheses[hypotheses.request_id == request_id]
    rows = of_request if include == "all" else of_request[of_request.status == "committed"]
    if positions is not None:
        rows = rows[rows.position.isin(positions)]
    if not rows.empty:
        return rows
    if of_request.empty:
        available = f"the table has requests {sorted(hypotheses.request_id.unique().tolist())}"
    else:
        counts = of_request.drop_duplicates("row").status.value_counts().to_dict()
        available = f"it has {counts} rows at positions {of_request.position.min()} to {of_request.position.max()}"
    wanted = "" if positions is None else f" at positions {positions.start} to {positions.stop - 1}"
    raise ValueError(f"no {include} hypotheses of request {request_id}{wanted}; {available}")


def columns_of(rows: pd.DataFrame) -> pd.DataFrame:
    """Returns a DataFrame with one line for each row of the trace, in the order of the grid's columns: by position; at
    one position the committed row first, then superseded rows, then rolled-back and abandoned rows by step."""
    order = rows.status.map({"committed": 0, "superseded": 1, "rolled_back": 2, "abandoned": 2})
    columns = rows.assign(order=order).drop_duplicates("row").sort_values(["position", "order", "step", "row"])
    return columns.reset_index(drop=True)


LABEL_WIDTH, PITCH, WIDEST = 50, 50, 112
"""Pixels: width of the axes' names, and least and largest width of a column."""
_ROW, _TOP, _BELOW = 19, 10, 57
_LEAST = 480
"""Least width in pixels of an SVG file: the colour scale and its name need it."""
_TINTS = {"superseded": "yellow", "rolled_back": "red", "abandoned": "grey"}
_OUTLINE = '<rect class="agrees" x="2" y="3" width="18" height="11" rx="2"/>'
_GREY = '<g class="v-1"><rect x="2" y="3" width="18" height="11"/></g>'
_READ = ["row", "layer", "token", "logprob_nats", "entropy_nats", "rank", "committed_logprob_nats"]
_ABOUT = ["row", "request_id", "step", "phase", "role", "status", "position", "committed_token", "read_token"]


def lens_grid(
    hypotheses: pd.DataFrame,
    request_id: int,
    *,
    colour: Measure = "logprob",
    include: Include = "committed",
    positions: range | None = None,
) -> Markup:
    """Returns HTML of one request's lens readings as a grid: layers upwards, a column for each row of the trace. A cell
    names the layer's most likely token for the next position; a green outline marks cells that name the committed
    token.

    hypotheses: from `Trace.hypotheses`.  colour: log-probability of the committed token, the layer's entropy (both in
    nats), or the committed token's rank (0 is first).  include: "committed" rows, or "all": superseded, rolled-back and
    abandoned rows have columns too.  positions: of input tokens; all by default.
    The reading at position p predicts the token at p + 1. Below each column: p, the input token, → the token committed
    at p + 1. Unless the colour is the entropy, cells are grey if no token was committed at p + 1, or if the row was fed
    a rejected or abandoned draft token: no committed token can be compared with it.
    Raises: ValueError if no reading is selected, or for another colour or `include`.  Source: logit lens
    (nostalgebraist 2020).
    """
    return grid_of(hypotheses, request_id, colour=colour, include=include, positions=positions)


def grid_of(
    readings: pd.DataFrame,
    request_id: int,
    *,
    colour: Measure = "logprob",
    include: Include = "committed",
    positions: range | None = None,
    width: float = 0,
    has_tips: bool = True,
    title: str | None = None,
) -> Markup:
    """Returns HTML of one request's lens readings: layers upwards, a column for each row of the trace. `lens_grid`
    explains the arguments that both functions have, and the cells.

    A column carries data-row, data-position and data-born (the step that computed the row), and starts at data-x; a
    cell carries data-layer. With has_tips, the browser shows the hover texts; without has_tips they are in data-says,
    so that the page's script can show them at once. The page can move the frame of class `cursor`: across to a column's
    data-x, and up from data-low by data-row-height for each of data-layers.
    width: pixels to fill, if columns can be stretched so far.  title: None for the finding of `readings`.
    """
    readings = readings[readings.site != "thought"]
    rows = select(readings, request_id, include, positions)
    columns = columns_of(rows)
    layers = np.sort(rows.layer.unique()).tolist()
    scale_title, shares, ticks = scale_of(rows, colour)
    shades = [-1 if np.isnan(share) else min(int(share * SHADES), SHADES - 1) for share in shares.tolist()]
    pitch = int(min(max((width - LABEL_WIDTH - 4) // len(columns), PITCH), WIDEST))
    height = _TOP + _ROW * len(layers)
    heights = {layer: height - _ROW * (i + 1) for i, layer in enumerate(layers)}
    cells_of_row: dict[int, list[TableLine]] = {}
    agrees = rows.agrees.fillna(False).astype(bool) & ~rows.status.isin(DISCARDED_DRAFT)
    for cell in rows[_READ].assign(shade=shades, agrees=agrees).sort_values("layer").itertuples():
        cells_of_row.setdefault(cell.row, []).append(cell)
    every = 1 if len(layers) <= 16 else 2
    of_drafter = drafter_layers(readings[readings.request_id == request_id])
    named = sorted({*layers[::every], *of_drafter})
    names = [("layer", _TOP - 1), *((f"{'▸' * (n in of_drafter)}{n}", heights[n] + 13) for n in named)]
    names += [("position", height + 19), ("read", height + 34), ("→ next", height + 49)]
    parts = [svg.text(LABEL_WIDTH - 6, y, name, "small muted", "end") for name, y in names]
    for i, column in enumerate(columns[_ABOUT].itertuples()):
        x = LABEL_WIDTH + pitch * i
        parts.append(_column(column, cells_of_row[column.row], heights, x, pitch, height, has_tips))
    parts.append(f'<rect class="cursor" width="{pitch + 1}" height="{_ROW + 1}" rx="3" style="display:none"/>')
    note = (
        f"{site_label(str(rows.site.iloc[0]))} of every layer through the "
        f"{markup(str(rows.lens.iloc[0]))} lens, rows that read positions {rows.position.min()} to "
        f"{rows.position.max()}. A cell names the layer's first choice for the next position. Below a column: {BELOW}."
        f"{DRAFTER_LAYER * bool(of_drafter)}"
    )
    if title is None:
        title = finding(readings[readings.request_id == request_id], request_id)
    label = f"Lens readings of request {request_id}: {len(layers)} layers, {len(columns)} rows"
    size, keys = (LABEL_WIDTH + pitch * len(columns) + 4, height + _BELOW), _keys(columns, has_grey=-1 in shades)
    facts = f'class="readings" data-row-height="{_ROW}" data-low="{height - _ROW}" data-layers="{layers}"'
    drawn = svg.picture(*size, label, parts, style=f"width:{size[0]}px;max-width:none")
    bar = f'<svg class="shades" viewBox="0 0 {10 * SHADES} 28" aria-hidden="true">{_bar(ticks)}</svg>'
    keys_html = legend(keys, f"<li>{bar}{scale_title}</li>")
    body = f'<div class="scroll">{drawn.replace("<svg ", f"<svg {facts} ", 1)}</div>'

    def draw() -> Drawing:
        """Returns the SVG file of the grid; the colour scale is below it."""
        below = size[1] + 8
        bar = f'<g transform="translate({LABEL_WIDTH} {below})">{_bar(ticks)}</g>'
        name = svg.text(LABEL_WIDTH + 10 * SHADES + 12, below + 10, scale_title)
        picture = svg.picture(max(size[0], _LEAST), below + 32, label, [*parts, bar, name])
        return picture_alone(title, picture, keys, note)

    return Markup.of(title, body, note, keys_html, draw)


def _column(
    column: TableLine, cells: list[TableLine], heights: dict[int, int], x: int, pitch: int, height: int, has_tips: bool
) -> str:
    """Returns SVG of one column of the grid: the cells of one row of the trace, outlines of layers that name the
    committed token, and the text below."""
    column_tip = f"{column_words(column)}\nrequest {column.request_id} · step {column.step} · {column.phase}\n"
    column_tip += f"{column.role} · {column.status.replace('_', ' ')} · {reads_and_predicts(column.position)}"
    was_fed_discarded = column.status in DISCARDED_DRAFT
    committed = None if pd.isna(column.committed_token) or was_fed_discarded else visible(column.committed_token)
    none = NOTHING_TO_COMPARE if was_fed_discarded else "nothing was committed there"
    about = f'data-row="{column.row}" data-position="{column.position}" data-born="{column.step}" data-x="{x}"'
    column_data = "" if has_tips else f'data-says="{markup(column_tip)}" '
    parts = [f'<g class="column" {about} {column_data}transform="translate({x} 0)">']
    middle, letters = f'{pitch / 2:g}"', TOKEN_COLUMNS * pitch // PITCH
    for cell in cells:
        y, target = heights[cell.layer], none
        if committed is not None:
            target = f"committed {committed}, rank {cell.rank}, log p {cell.committed_logprob_nats:.2f} nats"
        cell_tip = f"layer {cell.layer}: first choice {visible(cell.token)}, log p {cell.logprob_nats:.2f} nats\n"
        cell_tip += f"{target}\nentropy {cell.entropy_nats:.2f} nats"
        cell_data = "" if has_tips else f' data-says="{markup(cell_tip)}"'
        tip = f"<title>{markup(column_tip)}\n{markup(cell_tip)}</title>" if has_tips else ""
        parts.append(
            f'<g class="pick v{cell.shade}" data-layer="{cell.layer}"{cell_data}>{tip}<rect x="1" y="{y + 1}" '
            f'width="{pitch - 1}" height="{_ROW - 1}"/><text class="token" x="{middle} y="{y + 14}">'
            f"{markup(token_label(cell.token, letters))}</text></g>"
        )
    order = {layer: i for i, layer in enumerate(heights)}
    for low, high in runs_of([order[cell.layer] for cell in cells if cell.agrees]):
        top = height - _ROW * (high + 1)
        tall = _ROW * (high - low + 1) - 1
        parts.append(f'<rect class="agrees" x="1.5" y="{top + 1}" width="{pitch - 2}" height="{tall}" rx="2"/>')
    if column.status in _TINTS:
        parts.append(f'<path class="{_TINTS[column.status]}-stroke" stroke-width="5" d="M3 5H{pitch - 2}"/>')
    position, read, following = column_label(column, letters)
    parts.append(
        f'<path class="computed" d="M4 {height + 3}H{pitch - 4}"/>'
        f'<text class="small" x="{middle} y="{height + 19}">{position}</text>'
        f'<text class="token" x="{middle} y="{height + 34}">{markup(read)}</text>'
        f'<text class="token" x="{middle} y="{height + 49}">{markup(following)}</text></g>'
    )
    return "".join(parts)


def _bar(ticks: list[tuple[float, str]]) -> str:
    """Returns SVG of the colour scale, 200 x 28 px: the shades, with the labels of the ticks below."""
    cells = [f'<g class="v{i}"><rect x="{i * 10}" width="10" height="12"/></g>' for i in range(SHADES)]
    for share, name in ticks:
        anchor = "start" if share < 0.05 else "end" if share > 0.95 else "middle"
        cells.append(svg.text(share * 10 * SHADES, 25, name, "small muted", anchor))
    return "".join(cells)


def _keys(columns: pd.DataFrame, *, has_grey: bool) -> list[tuple[str, str]]:
    """Returns a list of (SVG elements, meaning): the legend of the marks that this grid has."""
    keys = [(_OUTLINE, "first choice = committed token")]
    if has_grey:
        keys.append((_GREY, NOT_COMPARED))
    for status, name in MARKS.items():
        if (columns.status == status).any():
            keys.append((f'<path class="{_TINTS[status]}-stroke" stroke-width="5" d="M1 8H19"/>', name))
    return keys
