"""The four phases of one verify window, each as a panel: heading, picture, one sentence."""

from collections.abc import Mapping, Sequence

import pandas as pd

from cacheprobe.views import svg
from cacheprobe.views.cache_picture import CACHE_HEIGHT, cache_picture
from cacheprobe.views.text import markup, subscript, text_of, token_label
from cacheprobe.views.windows import Window

WIDTH = 280
SETTLED_NATS, CONTESTED_NATS = 2.0, 0.5
"""A choice is drawn solid from the first margin on, dotted below the second."""
_MOST_REQUESTS = 8
_VERDICTS = {  # colour, texture, sign of the verifier's token
    "accepted": ("green", None, "check"),
    "recovered": ("green", "pending", "turn"),
    "bonus": ("green", "pending", "plus"),
    "rejected": ("red", None, "cross"),
}


def panel(heading: str, note: str, picture: str, sentence: str) -> str:
    """Heading and note are ours; the sentence is markup, its tokens escaped by whoever wrote it."""
    return f'<section class="panel"><h4>{heading} <small>{note}</small></h4>{picture}<p>{sentence}</p></section>'


def prefill_panel(events: pd.DataFrame, request_id: int, ledger: pd.DataFrame, name: str) -> str:
    """The prompt's pass: this request in blue, the others in grey, the cache all blue."""
    passes = events[(events.phase == "prefill") & events.step.isin(_steps(events, request_id, "prefill"))]
    beside = passes.request_id.nunique() - 1
    others = events.request_id.nunique() - 1
    first = passes.iloc[0]
    y = CACHE_HEIGHT + 34
    parts = cache_picture(["KV cache", "after prefill"], ledger)
    parts += [
        svg.arrow(54, y - 6, 54, CACHE_HEIGHT - 50),
        svg.box(12, y, 200, 48, "blue", tip=f"request {request_id}"),
        svg.text(112, y + 20, name, "strong halo on-blue", "middle"),
        svg.text(112, y + 37, f"{len(ledger)} prompt tokens", "halo on-blue", "middle"),
    ]
    if others:
        parts += [svg.box(12 + 9 * i, y + 72 - 7 * i, 200, 48, "grey", radius=5) for i in (2, 1, 0)][: min(others, 3)]
        front = 12 + 9 * max(0, 3 - min(others, 3))
        parts.append(svg.text(front + 100, y + 101, f"{others} other request{'s' * (others > 1)}", "halo on-grey", "middle"))
    num_passes = passes.step.nunique()
    sentence = (
        f"The prompt was read in {num_passes} pass{'es' * (num_passes != 1)} of {first.batch_rows} × {first.batch_slots} "
        f"tokens, with {beside} other request{'s' * (beside != 1)} beside it."
    )
    height = y + (124 if others else 52)
    label = f"Prefill: {len(ledger)} prompt tokens of request {request_id}; {others} other requests"
    return panel("Prefill", _step_note(passes.step), svg.picture(WIDTH, height, label, parts), sentence)


def decode_panel(
    events: pd.DataFrame, request_id: int, ledger: pd.DataFrame, newest: str, columns: Sequence[tuple[str, str, int]],
    *, is_verified: bool = True,
) -> str:  # fmt: skip
    """What was proposed after T0, above the grid of requests by tokens.

    newest: text of T0.  columns: (name, text, step) of each token.  is_verified: False where the tokens of this request
    are committed as they are decoded; they are grey then.
    """
    colour, texture = ("yellow", "provisional") if is_verified else ("grey", None)
    kind = "candidate" if is_verified else "committed as decoded"
    shown = abridged(len(columns), 4)
    gap = 6
    width = min((WIDTH - 80 - 8 - gap * (len(shown) - 1)) / max(len(shown), 1), 60)
    places = [(80 + place * (width + gap), index) for place, index in enumerate(shown)]
    top = CACHE_HEIGHT + 14
    parts = cache_picture(["KV cache", "after decode"], ledger)
    parts.append(svg.chip(8, top, 64, "T₀", newest, "green", tip="committed"))
    for x, index in places:
        if index is None:
            parts.append(svg.text(x + width / 2, top + 24, f"+ {_hidden(shown, len(columns))}", "muted", "middle"))
            continue
        name, token, step = columns[index]
        parts.append(svg.chip(x, top, width, name, token, colour, texture, tip=f"{kind}, step {step}"))
    steps = [columns[index][2] if index is not None else None for index in shown]
    grid, height = _grid(events, request_id, steps, [x for x, _ in places], width, top + 54, colour)
    count = len(columns)
    if is_verified and count:
        sentence = f"The fast path or drafter proposed {count} candidate{'s' * (count != 1)}; the rows it wrote are provisional."
    elif is_verified:
        sentence = "Nothing was drafted: the verifier alone chose the next token."
    else:
        sentence = "This request is never verified: each token is committed as it is decoded, and its rows stay."
    note = _step_note([step for _, _, step in columns])
    label = f"Decode: T0 and {count} tokens {kind}"
    return panel("Decode", note, svg.picture(WIDTH, height, label, parts + grid), sentence)


def _grid(
    events: pd.DataFrame, request_id: int, steps: Sequence[int | None], places: Sequence[float], width: float, top: float,
    colour: str,
) -> tuple[list[str], float]:  # fmt: skip
    """Requests x tokens, each cell by the margin of its choice; and where the picture ends."""
    if not places:
        return [], top
    cells = events[events.step.isin([step for step in steps if step is not None])]
    others = sorted(set(cells.request_id.tolist()) - {request_id})
    margins = cells.set_index(["request_id", "step"]).margin_nats
    parts, y = [], top
    for row in [request_id, *others[: _MOST_REQUESTS - 1]]:
        parts.append(svg.text(8, y + 13, f"request {row}", "small strong" if row == request_id else "small muted"))
        tint = colour if row == request_id else "grey"
        for x, step in zip(places, steps, strict=True):
            if step is None or (row, step) not in margins.index:
                continue
            margin = margins[row, step]
            is_known = bool(pd.notna(margin))
            said = f"{margin:.2f} nats between its two best tokens" if is_known else "no model pass"
            tip = f"request {row}, step {step}: {said}"
            parts.append(svg.box(x, y, width, 18, tint, _margin_texture(margin, tint), radius=3, tip=tip))
        y += 22
    if more := len(others[_MOST_REQUESTS - 1 :]):
        parts.append(svg.text(8, y + 12, f"and {more} more", "small muted"))
        y += 20
    y += 18
    parts.append(svg.text(8, y, "top-two margin, nats", "small muted"))
    keys = [(SETTLED_NATS, f"≥ {SETTLED_NATS:g}"), ((SETTLED_NATS + CONTESTED_NATS) / 2, "between"), (0.0, f"< {CONTESTED_NATS:g}")]
    for i, (margin, label) in enumerate(keys):
        x = 8 + i * 88
        parts.append(svg.box(x, y + 8, 26, 13, "grey", _margin_texture(margin, "grey"), radius=3))
        parts.append(svg.text(x + 32, y + 19, label, "small muted"))
    return parts, y + 26


def _margin_texture(margin: float, colour: str) -> str | None:
    if pd.isna(margin) or margin >= SETTLED_NATS:
        return None
    return f"crossed-{colour}" if margin >= CONTESTED_NATS else f"dotted-{colour}"


def verify_panel(window: Window, texts: Mapping[int, str]) -> str:
    """What the verifier was fed, what it answered, and the verdict on each."""
    inputs = (window.newest_token_id, *window.draft_token_ids)
    y = 34.0
    parts = [
        svg.text(43, 14, "fed", "small muted", "middle"),
        svg.text(149, 14, "verifier's own", "small muted", "middle"),
        svg.text(204, 14, "verdict", "small muted"),
    ]
    count = len(window.target_token_ids)
    shown = abridged(count, 9, around=window.num_accepted)
    for index in shown:
        if index is None:
            parts.append(svg.text(WIDTH / 2, y + 16, f"⋮  {_hidden(shown, count)} more  ⋮", "muted", "middle"))
            y += 36
            continue
        verdict = window.verdicts[index]
        colour, texture, sign = _VERDICTS[verdict]
        is_wrong = index > window.num_accepted
        fed = ("green", None) if index == 0 else ("red", None) if is_wrong else ("yellow", "provisional")
        fed_sign = "cross" if is_wrong else None
        parts += [
            svg.chip(8, y, 70, _name(index, candidate=index > 0), text_of(texts, inputs[index]), *fed, sign=fed_sign),
            svg.arrow(84, y + 20, 98, y + 20),
            svg.chip(104, y, 90, _compared(window, index), text_of(texts, window.target_token_ids[index]), colour, texture),
            svg.mark(211, y + 20, sign),
            svg.text(222, y + 24, verdict, "small red-ink" if sign == "cross" else "small"),
        ]
        y += 52
    label = "Verify: " + ", ".join(f"T{i + 1} {verdict}" for i, verdict in enumerate(window.verdicts))
    rows, slots = window.batch_shape
    sentence = _verdict_sentence(window, texts) + f" The pass has the fixed shape {rows} × {slots}."
    return panel("Verify", f"step {window.step}", svg.picture(WIDTH, y, label, parts), sentence)


def _compared(window: Window, index: int) -> str:
    """T1 (=T1′), T2 (≠T2′), or T3 where there is nothing it should equal."""
    name = _name(index + 1)
    if index > window.num_accepted or index >= len(window.draft_token_ids):
        return name
    return f"{name} ({'=' if index < window.num_accepted else '≠'}{name}′)"


def _verdict_sentence(window: Window, texts: Mapping[int, str]) -> str:
    accepted, drafted = window.num_accepted, len(window.draft_token_ids)
    own = len(window.committed_token_ids) > accepted
    said = f"{accepted} of {drafted} candidates equal the verifier's tokens." if drafted else "There was nothing to compare."
    if not own:
        return said
    name, token = _name(accepted + 1), _quoted(texts, window.committed_token_ids[-1])
    if window.is_rollback:
        wrong = _quoted(texts, window.draft_token_ids[accepted])
        return f"{said} At the first mismatch its own {name}, {token}, replaces {wrong}."
    return f"{said} Its own next token {name}, {token}, comes with them."


def outcome_panel(window: Window, ledger: pd.DataFrame, texts: Mapping[int, str]) -> str:
    """No rollback, or rollback: the sequence and the cache that are left."""
    back = window.is_rollback
    title = ["KV cache restored", "to the final", "accepted token"] if back else ["KV cache after", "accepting all tokens"]
    parts = cache_picture(title, ledger, step=window.step, truncated=window.num_truncated)
    sequence = (window.newest_token_id, *window.committed_token_ids)
    last = len(sequence) - 1
    y = CACHE_HEIGHT + 26
    parts.append(svg.text(8, y, "sequence", "small muted"))
    chips = []
    for index in abridged(len(sequence), 10):
        if index is None:
            chips.append(None)
            continue
        is_newest = index == last
        sign = None if index == 0 else _VERDICTS[window.verdicts[index - 1]][2]
        tip = "committed; its cache row is not written yet" if is_newest else "committed"
        chips.append((_name(index), text_of(texts, sequence[index]), "green", "pending" if is_newest else None, sign, tip))
    placed, y = _flow(chips, y + 12, len(sequence))
    parts += placed
    dropped = window.draft_token_ids[window.num_accepted :]
    if dropped:
        parts.append(svg.text(8, y + 16, "rolled back", "small muted"))
        chips = [
            None
            if index is None
            else (_name(window.num_accepted + 1 + index, candidate=True), text_of(texts, dropped[index]), "red", None, "cross", "")
            for index in abridged(len(dropped), 5)
        ]
        placed, y = _flow(chips, y + 28, len(dropped))
        parts += placed
    label = f"{'Rollback' if back else 'No rollback'}: {last} tokens committed, {len(dropped)} rolled back"
    newest = _name(last)
    if back:
        sentence = f"Sequence and KV restored to the final accepted token; {newest} is committed, its row pending."
    else:
        sentence = f"Sequence and KV after accepting all tokens (including {newest}, whose row is pending)."
    if window.finish:
        sentence += f" The request ends here ({markup(window.finish)})."
    return panel("Rollback" if back else "No rollback", "", svg.picture(WIDTH, y, label, parts), sentence)


def _flow(chips: Sequence[tuple | None], top: float, count: int) -> tuple[list[str], float]:
    """Chips in rows of five; None is a gap. Returns the strokes and where they end."""
    width, gap = 48, 6
    hidden = count - sum(chip is not None for chip in chips)
    parts = []
    for place, content in enumerate(chips):
        x, y = 8 + place % 5 * (width + gap), top + place // 5 * 52
        if content is None:
            parts.append(svg.text(x + width / 2, y + 24, f"+ {hidden}", "muted", "middle"))
            continue
        name, token, colour, texture, sign, tip = content
        parts.append(svg.chip(x, y, width, name, token, colour, texture, sign=sign, tip=tip))
    return parts, top + ((len(chips) - 1) // 5) * 52 + 48


def abridged(count: int, limit: int, around: int | None = None) -> list[int | None]:
    """Which of `count` things to draw in `limit` places: the first, those next to `around`, the last; None is a gap."""
    if count <= limit:
        return list(range(count))
    if around is None:
        return [*range(limit - 2), None, count - 1]
    start = min(max(around - (limit - 4) // 2, 1), count - (limit - 3))
    kept = sorted({0, *range(start, start + limit - 4), count - 1})
    shown: list[int | None] = []
    for index in kept:
        if shown and index - (shown[-1] or 0) > 1:
            shown.append(None)
        shown.append(index)
    return shown


def _hidden(shown: Sequence[int | None], count: int) -> int:
    return count - sum(index is not None for index in shown)


def _name(index: int, *, candidate: bool = False) -> str:
    return f"T{subscript(index)}{'′' * candidate}"


def _quoted(texts: Mapping[int, str], token_id: int) -> str:
    return f"<code>{markup(token_label(text_of(texts, token_id), 24))}</code>"


def _steps(events: pd.DataFrame, request_id: int, phase: str) -> list[int]:
    return events[(events.request_id == request_id) & (events.phase == phase)].step.tolist()


def _step_note(steps: Sequence[int] | pd.Series) -> str:
    numbers = sorted({int(step) for step in steps})
    if not numbers:
        return ""
    return f"step {numbers[0]}" if len(numbers) == 1 else f"steps {numbers[0]}–{numbers[-1]}"
