"""Selects and orders the lens readings of one request for a grid of layers and positions, and computes the numbers that
colour the grid."""

from typing import Literal, NamedTuple, SupportsIndex

import numpy as np
import pandas as pd

from cacheprobe.core.records import DISCARDED_DRAFT
from cacheprobe.core.values import TableLine
from cacheprobe.views.text import columns_of as width_of
from cacheprobe.views.text import token_label, visible

Measure = Literal["logprob", "entropy", "rank"]
Include = Literal["committed", "all"]

TOKEN_COLUMNS = 6
"""Largest width of a token in a cell or below a column, in columns of a monospaced font."""
SIGNS = {"committed": "", "superseded": "◇ ", "rolled_back": "✗ ", "given_up": "⊘ "}
MARKS = {
    "superseded": "◇ computed again by the verifier",
    "rolled_back": "✗ fed a rejected token or one after it",
    "given_up": "⊘ fed a draft that was given up",
}
NOTHING_TO_COMPARE = "fed a draft that was never committed, so no committed token can be compared with it"
NOT_COMPARED = "not compared with a committed token"
"""Text of the legend for grey cells: the row was rolled back or given up, or no next token was committed."""
BELOW = "position, token read → token to predict, the one committed next"
"""Text that explains the lines below a column of the grid, which `column_label` makes."""
FLOOR_NATS = -12.0
"""Log-probabilities below this value, in nats, share one colour."""
_RANKS = (0, 9, 99, 999, 9999)


def reads_and_predicts(position: SupportsIndex) -> str:
    """Returns text such as "reads position 7, predicts 8": the position of a row's input token, and of the token that
    the row predicts."""
    return f"reads position {int(position)}, predicts {int(position) + 1}"


def column_words(column: TableLine) -> str:
    """Returns text on one row of the trace, not escaped, such as "read 2 → predicts 4": its input token and the token
    committed next (not what the row predicted). If the row was fed a rejected draft token, one after it, or a given-up
    one, or if no token was committed next, the text says so instead.

    column: a line of the hypotheses table.
    """
    read = f"read {visible(column.read_token)}"
    if column.status in DISCARDED_DRAFT:
        is_rolled_back = column.status == "rolled_back"
        return f"{read}, {'a rejected token or one after it' if is_rolled_back else 'a draft that was given up'}"
    if pd.isna(column.committed_token):
        return f"{read}, nothing committed next"
    return f"{read} → predicts {visible(column.committed_token)}"


def column_label(column: TableLine, letters: int = TOKEN_COLUMNS) -> tuple[str, str, str]:
    """Returns the three lines of text below a column of the lens grid: the mark of the row's status (◇ superseded, ✗
    rolled back, ⊘ given up; none if committed) with the position; the input token; and "→" with the token committed
    next. Each token is cut to the width of `letters` monospaced characters, and not escaped.

    A dash replaces the next token if none was committed, or if the row was rolled back or given up.
    column: a line of the hypotheses table.
    """
    has_no_next = pd.isna(column.committed_token) or column.status in DISCARDED_DRAFT
    next_token = "—" if has_no_next else token_label(column.committed_token, letters)
    arrow = "→ " if width_of(next_token) < letters else "→"
    read = token_label(column.read_token, letters)
    return f"{SIGNS[column.status]}{column.position}", read, f"{arrow}{next_token}"


class Scale(NamedTuple):
    """Holds the number that colours each cell of the lens grid, with the range and the ticks of the colour scale.

    values: one number for each reading, NaN for a grey cell.  is_reversed: low numbers have the strongest colour.
    ticks: (number, label).
    """

    title: str
    values: pd.Series
    low: float
    high: float
    is_reversed: bool
    ticks: tuple[tuple[float, str], ...]


def scale_of(rows: pd.DataFrame, colour: Measure) -> Scale:
    """Returns a `Scale`: the number that colours each of these lens readings, with the range and ticks of the colours.
    colour: "logprob" of the committed token (nats), "entropy" (nats), or "rank" of the committed token (0 is the first
    choice; the numbers are log10(rank + 1)).

    A reading without a committed token has a number only for the entropy, and so has a row that was rolled back or
    given up, because no committed token can be compared with the row.
    Raises: ValueError for another colour.
    """
    is_comparable = rows["rank"].notna() & ~rows.status.isin(DISCARDED_DRAFT)
    if colour == "logprob":
        values = rows.committed_logprob_nats.astype(float).where(is_comparable)
        ticks = ((FLOOR_NATS, "≤ −12"), *((t, f"−{-t:g}") for t in (-9.0, -6.0, -3.0)), (0.0, "0"))
        return Scale("log p of the committed token (nats)", values, FLOOR_NATS, 0.0, False, ticks)
    if colour == "entropy":
        values = rows.entropy_nats.astype(float)
        high = max(float(values.max()), 1e-9) if values.notna().any() else 1.0
        ticks = tuple((float(t), f"{t:g}") for t in np.linspace(0, np.floor(high), 3)) if high >= 2 else ((0.0, "0"),)
        return Scale("entropy (nats)", values, 0.0, high, True, ticks)
    if colour == "rank":
        rank = rows["rank"].where(is_comparable).astype("Float64").to_numpy(dtype=float, na_value=np.nan)
        ticks = tuple((float(np.log10(t + 1)), str(t)) for t in _RANKS)
        values = pd.Series(np.log10(rank + 1), index=rows.index)
        return Scale("rank of the committed token", values, 0.0, ticks[-1][0], True, ticks)
    raise ValueError(f"unknown colour {colour!r}; it is 'logprob', 'entropy' or 'rank'")


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
    one position the committed row first, then superseded rows, then rolled-back and given-up rows by step."""
    order = rows.status.map({"committed": 0, "superseded": 1, "rolled_back": 2, "given_up": 2})
    columns = rows.assign(order=order).drop_duplicates("row").sort_values(["position", "order", "step", "row"])
    return columns.reset_index(drop=True)


def runs_of(numbers: list[int]) -> list[tuple[int, int]]:
    """Returns a list of (first, last), one for each unbroken run of whole numbers in a sorted list: [1, 2, 3, 7] gives
    [(1, 3), (7, 7)]."""
    known = set(numbers)
    starts = [n for n in numbers if n - 1 not in known]
    return list(zip(starts, [n for n in numbers if n + 1 not in known], strict=True))
