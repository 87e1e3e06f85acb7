"""Describes one token in a sentence or two: drafted, committed, and predicted from which layers."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pandas as pd

from cacheprobe.core.values import TableLine
from cacheprobe.plots.lens_table import runs_of
from cacheprobe.plots.text import shorten, text_of, visible
from cacheprobe.trace.tables.token_history import Fate, fates_at, fates_of_row, token_history

_COLUMNS = 24
"""Width of a token in the sentence."""


class Place(NamedTuple):
    """A token of a run that a sentence can describe."""

    request_id: int
    step: int
    position: int
    """Position of the row that predicts the token; the token itself is at the next position."""


def opening(events: pd.DataFrame) -> Place | None:
    """Returns the best token to look at first; None if no request was verified.

    It is the first partly accepted rollback, else any rollback, else any verify pass.
    events: as in `Trace.events`.
    """
    verdicts = events[(events.phase == "verify") & events.num_accepted.notna()]
    lost = verdicts[verdicts.num_rolled_back > 0]
    for pick in (lost[lost.num_accepted > 0], lost, verdicts):
        if len(pick):
            one = pick.iloc[0]
            return Place(int(one.request_id), int(one.step), int(one.draft_start) - 1 + _own(one))
    return None


def _own(event: TableLine) -> int:
    """Returns the index of the verifier's own token among those that the pass committed, or of the last one."""
    return min(int(event.num_accepted), len(event.committed_token_ids) - 1)


def first_insight(
    hypotheses: pd.DataFrame | None, rows: pd.DataFrame, events: pd.DataFrame, token_texts: Mapping[int, str]
) -> str:
    """Returns a sentence, as plain text, about the token that `opening` chooses; "" if there is none.

    hypotheses, rows, events: from `cp.analysis.lens_readings` (None without a lens), `Trace.row_table` and
    `Trace.events`, of one request or more.  token_texts: from `token_texts`.
    """
    at = opening(events)
    if at is None:
        return ""
    own = events[events.request_id == at.request_id]
    event = own[own.step == at.step].iloc[0]
    place = int(own[own.step < at.step].committed_token_ids.map(len).sum()) + _own(event)
    readings = pd.DataFrame()
    if hypotheses is not None:
        of_row = (hypotheses.request_id == at.request_id) & (hypotheses.position == at.position)
        readings = hypotheses[of_row & (hypotheses.status == "committed")]
    there = rows[(rows.request_id == at.request_id) & (rows.position == at.position)]
    said = insight(readings, there, fates_at(token_history(own), place), token_texts)
    return f"request {at.request_id}, step {at.step}: {said}"


def insight(
    readings: pd.DataFrame,
    rows: pd.DataFrame,
    fates: Sequence[Fate],
    token_texts: Mapping[int, str],
    *,
    step: int | None = None,
) -> str:
    """Returns, as plain text, the outcome of the tokens at one place, and the layers that predicted them.

    readings: lines of the hypotheses table of the predicting row; without any, layers are not mentioned.  rows: all
    rows at its position; they show at which layer an early drafter stopped.  fates: from `fates_at`.  step: the step
    that computed the row, whose own draft is then described; by default the last draft that was rolled back.
    """
    lost = next((fate for fate in reversed(fates) if fate.outcome == "rolled_back"), None)
    if step is not None:
        fates = fates_of_row(fates, step)
        lost = next((fate for fate in fates if fate.outcome in ("rolled_back", "given_up")), None)
    kept = next((fate for fate in reversed(fates) if fate.outcome not in (None, "rolled_back", "given_up")), None)
    parts = [_became(fates, lost, kept, rows, token_texts)]
    if len(readings) and kept is not None:
        parts.append(_layers(readings, lost, kept, token_texts))
    return ". ".join(parts)


def insight_in_vain(readings: pd.DataFrame, row: TableLine) -> str:
    """Returns, as plain text, the input and prediction of a row whose draft token was never committed.

    readings: the row's own lines; without any, layers are not mentioned.  row: its line of the rows table.
    """
    kind = "a rejected draft or one behind it" if row.status == "rolled_back" else "a draft that was given up"
    said = (
        f"fed “{shorten(visible(row.token), _COLUMNS)}”, {kind}; no committed token can be compared with its prediction"
    )
    if readings.empty:
        return said
    last = readings.sort_values("layer").iloc[-1]
    token = f"“{shorten(visible(last.token), _COLUMNS)}”"
    depth = f", first from layer {last.prediction_depth} on" if last.prediction_depth < last.layer else ""
    return f"{said}. Through the {last.lens} lens, layer {last.layer}, the last read, had {token} first{depth}"


def _became(
    fates: Sequence[Fate], lost: Fate | None, kept: Fate | None, rows: pd.DataFrame, texts: Mapping[int, str]
) -> str:
    if kept is None:
        waiting = next((fate for fate in reversed(fates) if fate.outcome is None), None)
        if waiting is None:
            return "nothing was committed here"
        return f"{_quoted(waiting.token_id, texts)} was {_drafted(waiting, rows)}, and no verdict was spoken"
    token = _quoted(kept.token_id, texts)
    if lost is not None:
        word, why = "rolled back", "behind an earlier mismatch"
        if lost.outcome == "given_up":
            word, why = "given up", "before a verdict"
        draft = f"{_quoted(lost.token_id, texts)}, {_drafted(lost, rows)}, was {word} in step {lost.decided_step}"
        if lost.decided_step == kept.decided_step:
            return f"{draft}, and {token} committed in its place"
        return f"{draft} {why}; {token} was committed in step {kept.decided_step}"
    if kept.outcome == "accepted":
        return f"{token}, {_drafted(kept, rows)}, was accepted in step {kept.decided_step}"
    own = "as it was computed" if kept.outcome == "committed" else "as the verifier's own"
    return f"{token} was committed in step {kept.decided_step}, {own}"


def _drafted(draft: Fate, rows: pd.DataFrame) -> str:
    """Returns when a token was drafted, and at which layer if its pass stopped early."""
    ran = rows.num_layers[rows.step == draft.born]
    stopped = len(ran) and ran.iloc[0] < rows.num_layers.max()
    return f"drafted in step {draft.born}" + (f" from layer {ran.iloc[0] - 1}" if stopped else "")


def _layers(readings: pd.DataFrame, lost: Fate | None, kept: Fate, texts: Mapping[int, str]) -> str:
    table = readings.sort_values("layer")
    layers, first = table.layer.tolist(), table.token_id.tolist()
    token, last, said, high = _quoted(kept.token_id, texts), "the last read,", [], None
    if lost is not None and lost.token_id != kept.token_id:
        had = [layer for layer, choice in zip(layers, first, strict=True) if choice == lost.token_id]
        if had:
            low, high = max(runs_of(had), key=lambda run: run[1] - run[0])
            span = f"layer {low}" if low == high else f"layers {low} to {high}"
            span += f", {last}" if high == layers[-1] else ""
            said.append(f"{span} had {_quoted(lost.token_id, texts)} first")
    if first[-1] != kept.token_id and high != layers[-1]:
        said.append(f"layer {layers[-1]}, {last} had {_quoted(first[-1], texts)} first")
    elif first[-1] == kept.token_id:
        others = [i for i, choice in enumerate(first) if choice != kept.token_id]
        since = layers[others[-1] + 1] if others else layers[0]
        said.append(f"{token} is first from layer {since} on" if since != layers[-1] else
                    f"layer {since}, {last} alone had {token} first")  # fmt: skip
    return f"Through the {table.lens.iloc[0]} lens, {'; '.join(said)}"


def _quoted(token_id: int, texts: Mapping[int, str]) -> str:
    return f"“{shorten(visible(text_of(texts, int(token_id))), _COLUMNS)}”"
