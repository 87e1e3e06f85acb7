"""Draws the phases of a request as panels (heading, picture, sentence): prefill, decode, verify and outcome."""

from collections.abc import Mapping, Sequence

import pandas as pd

from cacheprobe.analysis.windows import Window
from cacheprobe.views.diagrams import svg
from cacheprobe.views.diagrams.cache import CACHE_HEIGHT, cylinder_strokes
from cacheprobe.views.diagrams.frame import Panel
from cacheprobe.views.text import counted, markup, subscript, text_of, token_label

WIDTH = 280
_OUTCOMES = {  # colour, texture, sign of the verifier's token
    "accepted": ("green", None, "check"),
    "recovered": ("green", "pending", "turn"),
    "bonus": ("green", "pending", "plus"),
    "not used": ("red", None, "cross"),
}


def prefill_panel(
    events: pd.DataFrame, request_id: int, steps: Sequence[int], ledger: pd.DataFrame, name: str
) -> Panel:
    """Returns the `Panel` (heading, picture, sentence) of a request's prefill: the cache after prefill, the prompt in
    blue, and the other requests of the run in grey. steps: of the prefill.  name: text on the prompt's box."""
    passes = events[events.step.isin(steps)]
    num_in_batch = passes.request_id.nunique() - 1
    others = events.request_id.nunique() - 1
    y = CACHE_HEIGHT + 34
    step_words = step_note(passes.step)
    parts = cylinder_strokes(["KV cache", "after prefill"], ledger)
    parts += [
        svg.arrow(54, y - 6, 54, CACHE_HEIGHT - 50),
        svg.box(12, y, 200, 48, "blue", tip=f"request {request_id}: {len(ledger)} prompt tokens, read in {step_words}"),
        svg.text(112, y + 20, name, "strong halo on-blue", "middle"),
        svg.text(112, y + 37, f"{len(ledger)} prompt tokens", "halo on-blue", "middle"),
    ]
    if others:
        stack, tip = min(others, 3), f"{_other_requests(others)} of this run; {num_in_batch} in these passes"
        for i in reversed(range(stack)):  # the last one stands in front
            parts.append(svg.box(12 + 9 * i, y + 72 + 7 * (stack - 1 - i), 200, 44, "grey", tip=tip))
        label_y = y + 72 + 7 * (stack - 1) + 26
        parts.append(svg.text(112, label_y, _other_requests(others), "halo on-grey", "middle"))
    count = passes.step.nunique()
    up_to = "up to " if passes[["batch_rows", "batch_slots"]].drop_duplicates().shape[0] > 1 else ""
    shape = f"{up_to}{passes.batch_rows.max()} × {passes.batch_slots.max()}"
    batch = f"{_other_requests(num_in_batch)} beside it" if num_in_batch else "no other request beside it"
    sentence = f"The prompt was read in {counted(count, 'pass')} of {shape} tokens, {batch}."
    height = y + (134 if others else 52)
    label = f"Prefill: {len(ledger)} prompt tokens of request {request_id}, {_other_requests(others)}"
    return Panel("Prefill", step_note(passes.step), svg.picture(WIDTH, height, label, parts), sentence)


def verify_panel(window: Window, texts: Mapping[int, str]) -> Panel:
    """Returns the `Panel` (heading, picture, sentence) of a verify pass. A line shows a token fed to the verifier, the
    verifier's own token for the next position, and what became of the own token: accepted, recovered, bonus or not used
    (`Window.outcomes`). At most 9 lines are drawn, gaps included."""
    inputs = (window.newest_token_id, *window.draft_token_ids)
    y = 34.0
    parts = [
        svg.text(43, 14, "fed", "small muted", "middle"),
        svg.text(149, 14, "verifier's own", "small muted", "middle"),
        svg.text(204, 14, "verdict", "small muted"),
    ]
    count = len(window.target_token_ids)
    for index in abridged(count, 9, around=window.num_accepted):
        if index < 0:
            parts.append(svg.text(WIDTH / 2, y + 16, f"⋮  {-index} more  ⋮", "muted", "middle"))
            y += 40
            continue
        outcome = window.outcomes[index]
        colour, texture, sign = _OUTCOMES[outcome]
        is_rolled_back = index > window.num_accepted
        fed = ("green", None) if index == 0 else ("red", None) if is_rolled_back else ("yellow", "provisional")
        fed_sign = "cross" if is_rolled_back else None
        request, at, name = window.request_id, window.start - 1 + index, token_name(index, is_draft=index > 0)
        kind = _fed_kind(window, index)
        fed_tip, own_tip = (token_tip(request, at, kind, window.step), token_tip(request, at + 1, outcome, window.step))
        own = text_of(texts, window.target_token_ids[index])
        parts += [
            svg.chip(8, y, 70, svg.Chip(name, text_of(texts, inputs[index]), *fed, fed_sign, fed_tip)),
            svg.arrow(84, y + 20, 98, y + 20),
            svg.chip(104, y, 90, svg.Chip(_compared(window, index), own, colour, texture, tip=own_tip)),
            svg.mark(211, y + 20, sign),
            svg.text(222, y + 24, outcome, "small red-ink" if sign == "cross" else "small"),
        ]
        y += 62
    label = "Verify: " + ", ".join(f"T{i + 1} {outcome}" for i, outcome in enumerate(window.outcomes))
    rows, slots = window.batch_shape
    sentence = _verdict_sentence(window, texts) + f" The pass has the fixed shape {rows} × {slots}."
    return Panel("Verify", f"step {window.step}", svg.picture(WIDTH, y, label, parts), sentence, classes="panel middle")


def _fed_kind(window: Window, index: int) -> str:
    """Returns words on the token that a window feeds to the verifier at `index`; 0 is the newest committed token."""
    if index == 0:
        return "committed before"
    if index <= window.num_accepted:
        return "draft token"
    return "rejected draft token" if index == window.num_accepted + 1 else "draft token after a rejected one"


def _compared(window: Window, index: int) -> str:
    """Returns the name of the verifier's token and, if a draft token was compared with it, the result, such as "T₂
    (≠T₂′)"."""
    name = token_name(index + 1)
    if index > window.num_accepted or index >= len(window.draft_token_ids):
        return name
    return f"{name} ({'=' if index < window.num_accepted else '≠'}{name}′)"


def _verdict_sentence(window: Window, texts: Mapping[int, str]) -> str:
    accepted, drafted = window.num_accepted, len(window.draft_token_ids)
    has_own_token = len(window.committed_token_ids) > accepted
    sentence = "There was nothing to compare."
    if drafted:
        sentence = f"{accepted} of {drafted} draft tokens equal the verifier's tokens."
    if not has_own_token:
        return sentence
    name, token = token_name(accepted + 1), _quoted(texts, window.committed_token_ids[-1])
    if window.is_rollback:
        wrong = _quoted(texts, window.draft_token_ids[accepted])
        return f"{sentence} At the first mismatch its own {name}, {token}, replaces {wrong}."
    return f"{sentence} Its own next token {name}, {token}, comes with them."


def outcome_panel(window: Window, ledger: pd.DataFrame, texts: Mapping[int, str]) -> Panel:
    """Returns the `Panel` (heading, picture, sentence) after the verdict, with the heading "No rollback" or "Rollback":
    the cache that remains, the committed tokens, and the rolled-back draft tokens."""
    back = window.is_rollback
    title = ["KV cache after", "accepting all tokens"]
    if back:
        title = ["KV cache restored", "to the final", "accepted token"]
    parts = cylinder_strokes(title, ledger, step=window.step, truncated=window.num_truncated)
    last = len(window.committed_token_ids)
    request, start = window.request_id, window.start - 1
    before = token_tip(request, start, "committed before this window")
    chips = [svg.Chip("T₀", text_of(texts, window.newest_token_id), "green", tip=before)]
    for i, (token_id, outcome) in enumerate(zip(window.committed_token_ids, window.outcomes, strict=False), 1):
        kind = "committed; its cache slot is not written yet" if i == last else "committed"
        texture, tip = "pending" if i == last else None, token_tip(request, start + i, kind, window.step)
        chips.append(svg.Chip(token_name(i), text_of(texts, token_id), "green", texture, _OUTCOMES[outcome][2], tip))
    y = CACHE_HEIGHT + 26
    parts.append(svg.text(8, y, "sequence", "small muted"))
    placed, y = _flow(chips, y + 12, limit=10)
    parts += placed
    dropped = []
    for i, token_id in list(enumerate(window.draft_token_ids, 1))[window.num_accepted :]:
        tip = token_tip(request, start + i, "rolled back", window.step)
        name = token_name(i, is_draft=True)
        dropped.append(svg.Chip(name, text_of(texts, token_id), "red", sign="cross", tip=tip))
    if dropped:
        parts.append(svg.text(8, y + 18, "rolled back", "small muted"))
        placed, y = _flow(dropped, y + 30, limit=5)
        parts += placed
    title_word, newest = "Rollback" if back else "No rollback", token_name(last)
    sentence = f"Sequence and KV after accepting all tokens (including {newest}, whose slot is pending)."
    if back:
        sentence = f"Sequence and KV restored to the final accepted token; {newest} is committed, its slot pending."
    if window.finish:
        sentence += f" The request ends here ({markup(window.finish)})."
    label = f"{title_word}: {last} tokens committed, {len(dropped)} rolled back"
    return Panel(title_word, f"after step {window.step}", svg.picture(WIDTH, y, label, parts), sentence)


def _flow(chips: Sequence[svg.Chip], top: float, limit: int) -> tuple[list[str], float]:
    """Returns (SVG elements, y of their lower end): token boxes in lines of five. At most `limit` places are used; a
    count replaces the tokens that do not fit."""
    width, gap, places = 48, 6, abridged(len(chips), limit)
    parts = []
    for place, index in enumerate(places):
        x, y = 8 + place % 5 * (width + gap), top + place // 5 * 52
        if index < 0:
            parts.append(svg.text(x + width / 2, y + 24, f"+ {-index}", "muted", "middle"))
            continue
        parts.append(svg.chip(x, y, width, chips[index]))
    return parts, top + (len(places) - 1) // 5 * 52 + 46


def abridged(count: int, limit: int, around: int | None = None) -> list[int]:
    """Returns a list: which of `count` items to draw in at most `limit` places. Numbers from 0 are indices of items:
    the first, the last, and those next to `around` (by default those after the first). An entry -n is a gap that hides
    n items and takes one place."""
    if count <= limit:
        return list(range(count))
    room = limit - 3 if around is None else limit - 4  # the first item, the last one, and one or two gaps take places
    start = 1 if around is None else min(max(around - room // 2, 1), count - 1 - room)
    shown: list[int] = []
    previous = -1
    for index in sorted({0, *range(start, start + room), count - 1}):
        if hidden := index - previous - 1:
            shown.append(-hidden)
        shown.append(index)
        previous = index
    return shown


def token_tip(request_id: int, position: int, kind: str, step: int | None = None) -> str:
    """Returns the end of a token's hover text, such as "accepted; request 0, position 12, step 5"."""
    return f"{kind}; request {request_id}, position {position}" + ("" if step is None else f", step {step}")


def token_name(index: int, *, is_draft: bool = False) -> str:
    """Returns the name of a token in the diagrams: "T₁" for index 1, or "T₁′" for a draft token (`is_draft`)."""
    return f"T{subscript(index)}{'′' * is_draft}"


def _quoted(texts: Mapping[int, str], token_id: int) -> str:
    return f"<code>{markup(token_label(text_of(texts, token_id), 24))}</code>"


def _other_requests(count: int) -> str:
    return f"{counted(count, 'other request')}"


def step_note(steps: Sequence[int] | pd.Series) -> str:
    """Returns text for a panel's heading: "step 4", or "steps 4–9" from the first to the last; "" without steps."""
    numbers = sorted({int(step) for step in steps})
    if not numbers:
        return ""
    return f"step {numbers[0]}" if len(numbers) == 1 else f"steps {numbers[0]}–{numbers[-1]}"


def decode_panel(
    ledger: pd.DataFrame, newest: svg.Chip, tokens: Sequence[tuple[svg.Chip, int]], *, is_verified: bool = True
) -> Panel:
    """Returns the `Panel` (heading, picture, sentence) of a request's decode phase: the cache, the committed token T0
    (`newest`), and the tokens drafted or decoded after T0.

    tokens: (token, step that drafted or committed it).  is_verified: False if the request's tokens are committed as
    they are decoded.
    """
    y = CACHE_HEIGHT + 26
    parts, count = cylinder_strokes(["KV cache", "after decode"], ledger), len(tokens)
    placed, end = _flow([newest, *(chip for chip, _ in tokens)], y, limit=10)
    if not is_verified:
        sentence = "This request is never verified: each token is committed as it is decoded, and its cache slots stay."
    elif count:
        draft_tokens = counted(count, "draft token")
        sentence = f"The fast path or drafter proposed {draft_tokens}; the slots it wrote are provisional."
    else:
        sentence = "Nothing was drafted: the verifier alone chose the next token."
    label = f"Decode: T0 and {count} tokens {'draft token' if is_verified else 'committed as decoded'}"
    picture = svg.picture(WIDTH, end, label, parts + placed)
    return Panel("Decode", step_note([step for _, step in tokens]), picture, sentence)
