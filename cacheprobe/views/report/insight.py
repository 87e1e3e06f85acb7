"""Describes one generated token in a sentence or two: its drafts, their verdicts, and the layers that predicted the
token."""

from collections.abc import Mapping, Sequence

import pandas as pd

from cacheprobe.core.hook_names import site_label
from cacheprobe.core.records import DISCARDED_DRAFT
from cacheprobe.core.values import TableLine
from cacheprobe.trace.tables.draft_verdicts import verified_drafts
from cacheprobe.trace.tables.token_history import TokenOutcome, outcomes_at, outcomes_of_row, token_history
from cacheprobe.views.text import counted, runs_of, shorten, text_of, visible

_COLUMNS = 24
"""Largest width of a token in a sentence, in columns of a monospaced font."""


def first_to_show(events: pd.DataFrame) -> tuple[int, int, int] | None:
    """Returns (request, step, position of the row that predicts it) of the token to show first: the verifier's own
    token in the first partly accepted draft, else in the first rolled-back draft, else in the first verify pass with a
    verdict. Returns None without such a pass.

    events: as in `Trace.events`.
    """
    verdicts = events[(events.phase == "verify") & events.num_accepted.notna()]
    rolled_back = verdicts[verdicts.num_rolled_back > 0]
    for pick in (rolled_back[rolled_back.num_accepted > 0], rolled_back, verdicts):
        if len(pick):
            event = pick.iloc[0]
            return int(event.request_id), int(event.step), int(event.draft_start) - 1 + _own_index(event)
    return None


def _own_index(event: TableLine) -> int:
    """Returns the index of the verifier's own token among the tokens that the pass committed; without one, that of the
    last."""
    return min(int(event.num_accepted), len(event.committed_token_ids) - 1)


def first_insight(
    hypotheses: pd.DataFrame | None, rows: pd.DataFrame, events: pd.DataFrame, token_texts: Mapping[int, str]
) -> str:
    """Returns a sentence, as plain text, about the token that `first_to_show` chooses: its drafts, the committed token,
    and the layers that predicted them. Returns "" if no verify pass has a verdict.

    hypotheses, rows, events: from `cp.analysis.lens_readings` (None without a lens), `Trace.row_table` and
    `Trace.events`, of one request or more.  token_texts: from `token_texts`.
    """
    at = first_to_show(events)
    if at is None:
        return ""
    request, step, position = at
    of_request = events[events.request_id == request]
    event = of_request[of_request.step == step].iloc[0]
    generated_index = int(of_request[of_request.step < step].committed_token_ids.map(len).sum()) + _own_index(event)
    readings = pd.DataFrame()
    if hypotheses is not None:
        of_row = (hypotheses.request_id == request) & (hypotheses.position == position)
        readings = hypotheses[of_row & (hypotheses.status == "committed")]
    rows_here = rows[(rows.request_id == request) & (rows.position == position)]
    sentence = insight(readings, rows_here, outcomes_at(token_history(of_request), generated_index), token_texts)
    return f"request {request}, step {step}: {sentence}"


def insight(
    readings: pd.DataFrame, rows: pd.DataFrame, outcomes: Sequence[TokenOutcome], token_texts: Mapping[int, str],
    *, step: int | None = None,
) -> str:  # fmt: skip
    """Returns plain text about one position: the draft token, its verdict, the committed token, and at which layers
    each of them was the first choice.

    readings: lines of the hypotheses table of the predicting row; if empty, or if nothing was committed, layers are not
    mentioned.  rows: all rows at the position of that row, which show at which layer an early drafter stopped.
    outcomes: the tokens, from `outcomes_at`.  step: describes the tokens that this step drafted or judged. Without it,
    describes the last draft token that was rolled back, if any, and the committed token.
    """
    lost = next((token for token in reversed(outcomes) if token.outcome == "rolled_back"), None)
    if step is not None:
        outcomes = outcomes_of_row(outcomes, step)
        lost = next((token for token in outcomes if token.outcome in DISCARDED_DRAFT), None)
    kept = next((token for token in reversed(outcomes) if token.outcome not in (None, *DISCARDED_DRAFT)), None)
    parts = [_verdict_text(outcomes, lost, kept, rows, token_texts)]
    if len(readings) and kept is not None:
        parts.append(_layers_text(readings, lost, kept, token_texts))
    return ". ".join(parts)


def insight_in_vain(readings: pd.DataFrame, row: TableLine) -> str:
    """Returns, as plain text, the input token of a row that was fed a rejected or abandoned draft token, and the last
    layer's first choice.

    readings: the row's lines of the hypotheses table; if empty, layers are not mentioned.  row: the row's line of the
    rows table.
    """
    fed = "a rejected draft or one behind it" if row.status == "rolled_back" else "a draft that was abandoned"
    sentence = f"fed {_quoted_text(row.token)}, {fed}; no committed token can be compared with its prediction"
    if readings.empty:
        return sentence
    last = readings.sort_values("layer").iloc[-1]
    token = _quoted_text(last.token)
    depth = f", first from layer {last.prediction_depth} on" if last.prediction_depth < last.layer else ""
    return f"{sentence}. {_through(last)}, layer {last.layer}, the last read, had {token} first{depth}"


def _verdict_text(
    outcomes: Sequence[TokenOutcome],
    lost: TokenOutcome | None,
    kept: TokenOutcome | None,
    rows: pd.DataFrame,
    texts: Mapping[int, str],
) -> str:
    """Returns text on the draft token `lost`, its verdict, and the committed token `kept`; without `kept`, on the last
    token without a verdict."""
    if kept is None:
        undecided = next((token for token in reversed(outcomes) if token.outcome is None), None)
        if undecided is None:
            return "nothing was committed here"
        return f"{_quoted(undecided.token_id, texts)} was {_draft_text(undecided, rows)}, and no verdict was spoken"
    token = _quoted(kept.token_id, texts)
    if lost is not None:
        word, reason = "rolled back", "behind an earlier mismatch"
        if lost.outcome == "abandoned":
            word, reason = "abandoned", "before a verdict"
        draft = f"{_quoted(lost.token_id, texts)}, {_draft_text(lost, rows)}, was {word} in step {lost.decided_step}"
        if lost.decided_step == kept.decided_step:
            return f"{draft}, and {token} committed in its place"
        return f"{draft} {reason}; {token} was committed in step {kept.decided_step}"
    if kept.outcome == "accepted":
        return f"{token}, {_draft_text(kept, rows)}, was accepted in step {kept.decided_step}"
    origin = "as it was computed" if kept.outcome == "committed" else "as the verifier's own"
    return f"{token} was committed in step {kept.decided_step}, {origin}"


def _draft_text(draft: TokenOutcome, rows: pd.DataFrame) -> str:
    """Returns text on the pass that drafted a token, such as "drafted in step 4", or "drafted in step 4 from layer 7"
    if that pass stopped early."""
    layers_run = rows.num_layers[rows.step == draft.born]
    stopped_early = len(layers_run) and layers_run.iloc[0] < rows.num_layers.max()
    return f"drafted in step {draft.born}" + (f" from layer {layers_run.iloc[0] - 1}" if stopped_early else "")


def _layers_text(
    readings: pd.DataFrame, lost: TokenOutcome | None, kept: TokenOutcome, texts: Mapping[int, str]
) -> str:
    """Returns text on the layers whose first choice was the lost draft token (`lost`) or the committed token
    (`kept`)."""
    table = readings.sort_values("layer")
    layers, first_choices = table.layer.tolist(), table.token_id.tolist()
    token, last_words, parts = _quoted(kept.token_id, texts), "the last read,", []
    if lost is not None and lost.token_id != kept.token_id:
        layers_of_lost = [layer for layer, choice in zip(layers, first_choices, strict=True) if choice == lost.token_id]
        if layers_of_lost:
            span = _span(layers_of_lost, layers) + (f", {last_words}" if layers_of_lost[-1] == layers[-1] else "")
            parts.append(f"{span} had {_quoted(lost.token_id, texts)} first")
    if first_choices[-1] != kept.token_id and (lost is None or first_choices[-1] != lost.token_id):
        parts.append(f"layer {layers[-1]}, {last_words} had {_quoted(first_choices[-1], texts)} first")
    elif first_choices[-1] == kept.token_id:
        others = [i for i, choice in enumerate(first_choices) if choice != kept.token_id]
        from_layer = layers[others[-1] + 1] if others else layers[0]
        parts.append(f"{token} is first from layer {from_layer} on" if from_layer != layers[-1] else
                    f"layer {from_layer}, {last_words} alone had {token} first")  # fmt: skip
    return f"{_through(table.iloc[0])}, {'; '.join(parts)}"


def _through(reading: pd.Series) -> str:
    """Returns text on the lens of a reading, and on its site if that is not the residual stream."""
    site = "" if reading.get("site", "S") == "S" else f" of {site_label(reading.site)}"
    return f"Through the {reading.lens} lens{site}"


def _span(chosen: list[int], layers: list[int]) -> str:
    """Returns text such as "layers 19 to 22, 25 and 28". chosen: some of `layers`, the layers that were read; both in
    order. Layers that were read one after the other are one range."""
    places = [layers.index(layer) for layer in chosen]
    runs = [(layers[first], layers[last]) for first, last in runs_of(places)]
    words = [str(low) if low == high else f"{low} to {high}" for low, high in runs]
    return f"layer{'s' * (len(chosen) > 1)} " + " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _quoted(token_id: int, texts: Mapping[int, str]) -> str:
    return _quoted_text(text_of(texts, int(token_id)))


def _quoted_text(text: str) -> str:
    return f"“{shorten(visible(text), _COLUMNS)}”"


def drafts_sentence(drafter: str, events: pd.DataFrame) -> str:
    """Returns a sentence on what became of the draft tokens of a run. drafter: its name, inserted as it is; "" for the
    fast path."""
    drafted, accepted, rejected, rolled_back = verified_drafts(events)
    if not drafted:
        return "No draft token was verified."
    parts = f"{accepted} accepted, {rolled_back} rolled back"
    if behind := rolled_back - rejected:
        parts += f": {rejected} rejected, {behind} behind a rejected one"
    of_tokens = f"{counted(drafted, 'token')} that {'was' if drafted == 1 else 'were'} verified"
    return f"{drafter or 'The fast path'} drafted {of_tokens}: {parts}."
