"""Draws a request as text: its tokens in line, coloured by a measure, rejected drafts above, thoughts below."""

from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import pandas as pd

from cacheprobe.core.values import TableLine
from cacheprobe.tasks.words import PAD
from cacheprobe.trace.tables.draft_verdicts import drafts_table, rejected_by_place, token_measures
from cacheprobe.views.diagrams.frame import Markup
from cacheprobe.views.text import counted, markup, text_of, token_label, token_texts, visible
from cacheprobe.views.thoughts.columns import words_of

TextMeasure: TypeAlias = Literal["verdict", "depth", "entropy", "logprob", "feature", "difference"]

MOST_TOKENS = 2000
"""Largest number of tokens in one picture."""
_ABOVE = 24
"""Largest width of a draft above or a thought below the text, in columns of a monospaced font."""
_NAMES = {
    "depth": "prediction depth (layer)",
    "entropy": "entropy of the last layer read (nats)",
    "logprob": "log-probability of the committed token in the last layer read (nats)",
    "feature": "activation of the feature in the row that reads the token",
    "difference": "difference from the other program's log-probability, without its sign (nats)",
}
_LEGEND = (
    ("accepted", "accepted draft"),
    ("own", "verifier's own token"),
    ("undrafted", "committed without a draft"),
)
_CLASSES = {"accepted": "accepted", "recovered": "own", "bonus": "own", "committed": "undrafted"}
_OUTCOMES = {
    "accepted": "drafted and accepted",
    "recovered": "the verifier's own token, instead of a draft",
    "bonus": "the verifier's own token, after its draft",
    "committed": "committed without a draft",
}


class TextParts(NamedTuple):
    """Holds the tables of one request that its text is drawn from."""

    request_id: int
    prompt: tuple[str, ...]
    """Texts of the prompt's tokens; pads in front are not drawn."""
    tokens: pd.DataFrame
    """From `token_measures`."""
    rejected: Mapping[int, list[tuple[int, int]]]
    """From `rejected_by_place`."""
    lens: str
    """Name of the lens of the readings; "" without any."""
    thoughts: Mapping[int, str]
    """Words of a thought by the absolute position of its chunk's last token."""
    noted: Mapping[int, str] = {}
    """Texts of notes by the absolute position of the token."""


def request_text(
    rows: pd.DataFrame,
    events: pd.DataFrame,
    request_id: int,
    hypotheses: pd.DataFrame | None = None,
    thoughts: pd.DataFrame | None = None,
    *,
    measure: TextMeasure | int = "verdict",
    texts: Mapping[int, str] | None = None,
    values: pd.DataFrame | None = None,
) -> Markup:
    """Returns HTML of one request as people read it: the prompt in grey, and each generated token coloured by a
    measure, with the drafts that were rejected at its place above it, and the thoughts of a Thinking States model
    below.

    rows, events, hypotheses, thoughts: from the methods of `Trace`; hypotheses=None for a run without Z.
    measure: "verdict" of the drafts; or of the readings that predict a token: "depth", the prediction depth (layer);
    "entropy" and "logprob" of the committed token, both in nats, of the last layer that was read. A stronger colour is
    a later layer, a higher entropy, or a lower log-probability. Or the number of a dictionary's feature: its
    activation; or "difference" from the other program of a replay.
    texts: of tokens by id, such as `Trace.token_texts`; by default those in the tables, without the last token's if it
    has no row.
    values: for a feature the table `Trace.features`; a token is not coloured if the activation is not in the table, and
    could be lower than those that are. For "difference" the table `cp.analysis.engine_differences` of a replay.
    The first 2,000 generated tokens are drawn.
    Raises: ValueError for an unknown request or measure, and for a measure of readings without hypotheses.
    """
    own_rows, own_events = rows[rows.request_id == request_id], events[events.request_id == request_id]
    if own_rows.empty or own_events.empty:
        known = sorted({int(r) for r in rows.request_id})
        raise ValueError(f"there is no request {request_id}; the tables have {known}")
    prompt = own_rows[own_rows.role == "prompt"].drop_duplicates("position", keep="last").sort_values("position")
    num_prompt_tokens = int(prompt.position.max()) + 1
    parts = text_parts(request_id, tuple(prompt.token), num_prompt_tokens, own_events, hypotheses, thoughts)
    if values is not None:
        values = values[values.request_id == request_id]
        parts = with_differences(parts, values) if isinstance(measure, str) else with_feature(parts, values, measure)
    name: TextMeasure = measure if isinstance(measure, str) else "feature"
    return text_piece(parts, {**token_texts(rows, hypotheses), **(texts or {})}, name)


def text_parts(
    request_id: int,
    prompt: tuple[str, ...],
    num_prompt_tokens: int,
    events: pd.DataFrame,
    readings: pd.DataFrame | None,
    thoughts: pd.DataFrame | None,
) -> TextParts:
    """Returns the `TextParts` of a request. events, thoughts: tables of `Trace`.  readings: lines of
    `Trace.hypotheses`. They may hold other requests too; None if the run has none."""
    words = {}
    if thoughts is not None:
        kept = thoughts[(thoughts.request_id == request_id) & (thoughts.status == "committed")]
        kept = kept.sort_values("step", kind="stable")  # of two thoughts with one end, the later step counts
        words = {int(thought.end): " ".join(words_of(thought)).strip() for thought in kept.itertuples()}
    events = events[events.request_id == request_id]
    readings = None if readings is None else readings[readings.request_id == request_id]
    measured = token_measures(events, readings, num_prompt_tokens)
    lens = "" if readings is None or readings.empty else str(readings.lens.iloc[0])
    rejected = rejected_by_place(drafts_table(events))
    return TextParts(request_id, prompt, measured, rejected, lens, words)


def with_feature(parts: TextParts, features: pd.DataFrame, feature: int) -> TextParts:
    """Returns the parts with a column feature of `tokens`: the activation of one feature in the committed row that
    reads the token.

    Each row stores only its k largest features; k is the length of the longest list. If the list of a row lacks the
    feature, the value is 0 if the list is shorter than k, and null if it has k: the feature may have been cut off.
    The value is null too if the row has no list, or if no row reads the token.
    features: of the request, with the columns of `Trace.features`.
    """
    committed = features[features.status == "committed"]
    counts = committed.groupby("position").size()
    most = int(features.groupby("row").size().max()) if len(features) else 0
    activations = dict.fromkeys(counts[counts < most].index.tolist(), 0.0)
    active = committed[committed.feature == feature]
    activations |= dict(zip(active.position.tolist(), active.activation.tolist(), strict=True))
    values = [activations.get(position + 1, pd.NA) for position in parts.tokens.position.tolist()]
    return parts._replace(tokens=parts.tokens.assign(feature=pd.array(values, dtype="Float64")))


def with_differences(parts: TextParts, differences: pd.DataFrame) -> TextParts:
    """Returns the parts with a column difference of `tokens`, 0 or more; null where the other program gave no
    log-probability. differences: of the request, with position and difference_nats."""
    sizes = dict(zip(differences.position.tolist(), differences.difference_nats.abs().tolist(), strict=True))
    values = [sizes.get(position + 1, float("nan")) for position in parts.tokens.position.tolist()]
    return parts._replace(tokens=parts.tokens.assign(difference=pd.Series(values, dtype="Float64").to_numpy()))


def text_piece(
    parts: TextParts,
    texts: Mapping[int, str],
    measure: TextMeasure,
    places: range | None = None,
    *,
    says: str = "title",
) -> Markup:
    """Returns HTML of the text. places: which generated tokens to draw, at most 2,000; None for the first
    of them. says: attribute with the hover texts, "title" or one that a script reads.

    A token carries data-position, of the row that predicts it, and data-step, in which it was committed.
    Raises: ValueError as `request_text`.
    """
    if measure != "verdict" and measure not in _NAMES:
        raise ValueError(f"unknown measure {measure!r}; it is 'verdict', {', '.join(map(repr, _NAMES))}")
    tokens, request = parts.tokens, parts.request_id
    is_unknown = measure != "verdict" and (measure not in tokens or tokens[measure].isna().all())
    if measure == "feature" and measure not in tokens:
        raise ValueError("there is no feature to colour the text by; give measure=FEATURE, values=trace.features(...)")
    if measure == "difference" and is_unknown:
        raise ValueError(
            f"request {request} has no log-probabilities of another program; replay a response with them, and give "
            "values=cp.analysis.engine_differences(trace)"
        )
    if measure != "feature" and is_unknown:
        raise ValueError(
            f"request {request} has no readings to take the {measure} from; record Z, or choose the verdict"
        )
    places = range(min(len(tokens), MOST_TOKENS)) if places is None else places
    shown = tokens[tokens.place.isin(places)]
    shares = None if measure == "verdict" else _shares(tokens, measure)
    has_spaces = any("␣" in text for text in (*parts.prompt, *(text_of(texts, int(t)) for t in shown.token_id)))
    between = "" if has_spaces else " "  # tokens of a tokenizer of whole words have no spaces
    blocks: list[tuple[str, str]] = []  # (HTML of a token, the thought about a chunk that ends with it)
    if places.start == 0:
        blocks += _prompt(parts, between)
    for token in shown.itertuples():
        drafts, thought = parts.rejected.get(int(token.place), []), parts.thoughts.get(int(token.position) + 1, "")
        text = text_of(texts, int(token.token_id))
        html = _token(token, _in_frame(text) if drafts or thought else _in_line(text), text, shares, says, parts)
        if drafts:
            above = "".join(_draft(d, step, token, texts, says, request) for d, step in drafts)
            html = f"<ruby>{html}<rt>{above}</rt></ruby>"
        blocks.append((html, thought))
        if (drafts or thought) and "⏎" in text:
            blocks.append(("\n", ""))
    prose = between.join(
        f'<ruby class="thought">{html}<rt>{markup(token_label(thought, _ABOVE))}</rt></ruby>' if thought else html
        for html, thought in blocks
    )
    note = "" if len(shown) == len(tokens) else f"Generated tokens {places.start + 1} to {places.start + len(shown)}."
    body = f'<div class="prose" dir="auto" tabindex="0">{prose}</div>'
    return Markup.of(_finding(parts), body, note, _legend(tokens, measure, parts.lens))


def _prompt(parts: TextParts, between: str) -> list[tuple[str, str]]:
    """Returns HTML of pieces of the prompt, and the thought about the chunk that ends with a piece; of a longer prompt
    the last 2,000 tokens."""
    num_pads = next((i for i, text in enumerate(parts.prompt) if text != PAD), 0)
    first = max(len(parts.prompt) - MOST_TOKENS, num_pads)
    pieces, piece = [], [f"… {first - num_pads:,} tokens before\n"] if first > num_pads else []
    for position, text in enumerate(parts.prompt[first:], first):
        piece.append(_plain(text))
        thought = parts.thoughts.get(position, "")
        if thought or position == len(parts.prompt) - 1:
            said = between.join(piece)
            pieces.append((f'<span class="asked">{markup(_in_frame(said) if thought else said)}</span>', thought))
            piece = []
    return pieces


def _plain(text: str) -> str:
    return text.replace("␣", " ").replace("⏎", "\n")


def _in_line(text: str) -> str:
    """Returns the text of a generated token as it stands in line: spaces as they are, and a sign before a newline."""
    return text.replace("␣", " ").replace("⏎", "⏎\n")


def _in_frame(text: str) -> str:
    """Returns the text of tokens that have a wider text above or below them. The browser adds blanks at both ends, so
    spaces there become signs."""
    text = text.replace("␣", " ")
    inner = text.strip(" ")
    start = len(text) - len(text.lstrip(" "))
    return "␣" * start + inner + "␣" * (len(text) - start - len(inner))


def _finding(parts: TextParts) -> str:
    outcomes, count = parts.tokens.outcome, len(parts.tokens)
    head = f"Request {parts.request_id} generated {counted(count, 'token')}"
    accepted, rejected = int((outcomes == "accepted").sum()), sum(map(len, parts.rejected.values()))
    if not rejected and not accepted:
        return f"{head}, and no draft was judged"
    return f"{head}; drafts: {accepted} accepted, {rejected} rejected"


def _shares(tokens: pd.DataFrame, measure: str) -> dict[int, float]:
    """Returns the share of the strongest colour by place, 0 to 1; a token without a number is left out."""
    known = tokens[tokens[measure].notna()]
    shares = np.clip(known[measure].to_numpy(dtype=float) / (_strongest(tokens, measure) or 1e-9), 0, 1)
    return dict(zip(known.place.tolist(), shares.tolist(), strict=True))


def _strongest(tokens: pd.DataFrame, measure: str) -> float:
    """Returns the number of the strongest colour: the last layer read, the lowest log-probability (at most -1), or the
    largest value."""
    if measure == "depth":
        return float(tokens.layer.max())
    values = tokens[measure].dropna().to_numpy(dtype=float)
    return min(float(values.min()), -1.0) if measure == "logprob" else float(values.max(initial=0.0))


def _token(
    token: TableLine, shown: str, text: str, shares: Mapping[int, float] | None, says: str, parts: TextParts
) -> str:
    """Returns HTML of one generated token. token: a line of `token_measures`.  shown: its text in the picture."""
    place, outcome = int(token.place), str(token.outcome)
    note = parts.noted.get(int(token.position) + 1)
    tip = f"request {parts.request_id}, generated token {place + 1} ({visible(text)}), "
    tip += f"position {int(token.position) + 1}\n"
    tip += f"{_OUTCOMES[outcome]} in step {int(token.decided_step)}"
    for name, words in (("depth", "prediction depth"), ("logprob", "log-probability"), ("entropy", "entropy")):
        value = getattr(token, name)
        if not pd.isna(value):
            tip += f"\n{words}: " + (f"layer {int(value)}" if name == "depth" else f"{value:.2f} nats")
    if not pd.isna(activation := getattr(token, "feature", pd.NA)):
        tip += f"\nactivation: {activation:.2f}"
    if not pd.isna(difference := getattr(token, "difference", pd.NA)):
        tip += f"\ndifference from the other program: {difference:.4f} nats"
    if note is not None:
        tip += f"\nnote: {note}" if note else "\npinned"
    classes = ["pick", *([_CLASSES[outcome]] if shares is None else ["shade"] * (place in shares))]
    kind = f'class="{" ".join([*classes, *["noted"] * (note is not None)])}"'
    if shares is not None and place in shares:
        kind += f' style="--p:{shares[place]:.2f}"'
    kind += f' data-step="{int(token.decided_step)}"'
    return f'<span {kind} data-position="{int(token.position)}" {says}="{markup(tip)}">{markup(shown)}</span>'


def _draft(token_id: int, step: int, token: TableLine, texts: Mapping[int, str], says: str, request: int) -> str:
    """Returns HTML of a draft that was rejected in a step. token: the line of `token_measures` that replaced it."""
    text = text_of(texts, token_id)
    tip = f"request {request}, rejected in step {step}: draft {visible(text)}, "
    tip += f"replaced by {visible(text_of(texts, int(token.token_id)))}; position {int(token.position) + 1}"
    go = f'data-intent="draft" data-request="{request}" data-step="{step}" data-position="{int(token.position)}"'
    return f'<del {go} {says}="{markup(tip)}">{markup(token_label(text, _ABOVE))}</del>'


def _legend(tokens: pd.DataFrame, measure: str, lens: str) -> str:
    if measure != "verdict":
        strongest, digits = _strongest(tokens, measure), 2 if measure == "difference" else 1
        low, high = "0", f"{strongest:.{digits}f}".replace("-", "−")
        if measure == "depth":
            low, high = "layer 0", f"layer {strongest:.0f}"
        scale = "".join(f'<i class="shade" style="--p:{i / 9:.2f}"></i>' for i in range(10))
        name = _NAMES[measure] + f", {lens} lens" * (measure in ("depth", "entropy", "logprob"))
        return f'<ul class="legend"><li>{markup(name)}: {low} <span class="ramp">{scale}</span> {high}</li></ul>'
    listed = "".join(f'<li><i class="{kind}">abc</i> {words}</li>' for kind, words in _LEGEND)
    gone = "<li><del>abc</del> rejected draft, above the token that replaced it, in a frame (␣: space)</li>"
    return f'<ul class="legend">{listed}{gone}</ul>'
