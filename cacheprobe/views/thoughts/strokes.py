"""Draws the parts of the thoughts picture as SVG, from the bottom: chunk, chunk state, transformer blocks, thinking
block T and compression block C, thought; and the cache."""

from collections.abc import Sequence

import pandas as pd

from cacheprobe.core.values import JsonDict, TableLine
from cacheprobe.views.diagrams import svg
from cacheprobe.views.diagrams.cache import CACHE_HEIGHT, cylinder_strokes
from cacheprobe.views.text import counted, markup, shorten, subscript, token_label, visible
from cacheprobe.views.thoughts.columns import Column, words_of

Fill = tuple[str, str | None]
"""Colour and texture of a box."""

CACHE_WIDTH, PITCH, GAP_WIDTH, MARGIN = 250, 84, 52, 60
"""Pixels: width of the cache, of a column with its gutter, of a gap, and of the levels' names."""

_WIDTH, _CHIP, _LINE = 72, 64, 20
_LEFT, _RIGHT = 17, 54
"""Centres of a column's halves, in pixels: S and T on the left, plus and C on the right."""
_MOST_TOKENS, _MOST_WORDS = 8, 4


_BLOCKS, _L_OUT, _BACKBONE, _L_IN, _STATE, _TOKENS = 24, 64, 78, 118, 134, 190
"""Levels of the picture, in pixels below the end of the thoughts: the boxes of T (thinking block) and C (compression
block), the line L_out, the backbone's blocks, the line L_in, the chunk states, and the tokens."""


def heights(columns: Sequence[Column]) -> tuple[float, float]:
    """Returns (height above the end of the thoughts, height below it) of a picture of these columns, in pixels: longer
    thoughts and chunks need more."""
    lengths = [len(column.thought.tokens) for column in columns if column.thought is not None]
    longest_chunk = min(max(len(column.tokens) for column in columns), _MOST_TOKENS + 1)
    return 32.0 + min(max(lengths, default=1), _MOST_WORDS + 1) * _LINE, _TOKENS + longest_chunk * _LINE + 28


def level_strokes(x: float, width: float, settings: JsonDict) -> list[str]:
    """Returns a list of SVG elements: the line L_out, at which the thinking block reads states, and the line L_in, at
    which chunk states are added."""
    parts = []
    for y, name, layer in ((_L_OUT, "out", settings["l_out"]), (_L_IN, "in", settings["l_in"])):
        block = "" if layer is None else f"block {layer - 1 if name == 'out' else layer}"
        meaning = "thoughts are read from what leaves" if name == "out" else "states are added to what enters"
        tip = f"L{name}: {meaning} {block or 'the looped blocks'}"
        label = (
            f'<text x="{width - MARGIN + 8:g}" y="{y + 4:g}" class="strong">L<tspan dy="-4" class="small">{name}'
            "</tspan></text>"
        )
        line = f'<path d="M{x - 8:g} {y:g}H{width - MARGIN + 2:g}" class="level"/>'
        block_label = svg.text(width - MARGIN + 8, y + 17, block, "small muted") if block else ""
        parts.append(_tipped(tip, [line, label, block_label]))
    return parts


def column_strokes(x: float, column: Column, settings: JsonDict, *, is_new: bool) -> list[str]:
    """Returns a list of SVG elements of one chunk, from its tokens at the bottom up to its thought.

    is_new: the thought differs from the thought before, and gets a stronger frame.
    """
    name = subscript(column.chunk + 1)
    parts = _chunk(x, column)
    is_added = settings["feeds_back"] and (column.source is not None or column.chunk == 0)
    y = _STATE + 13
    up = x + _RIGHT
    if is_added:
        parts += [svg.arrow(up, _TOKENS - 2, up, y + 9), svg.arrow(up, y - 9, up, _BACKBONE + 24)]
        parts += _state(x, column, settings, name)
    else:
        parts.append(svg.arrow(up, _TOKENS - 2, up, _BACKBONE + 24))
    first_block, end_block = settings["l_in"], settings["l_out"]
    blocks = "blocks"
    if first_block is not None:
        is_one = end_block == first_block + 1
        blocks = f"block {first_block}" if is_one else f"blocks {first_block}–{end_block - 1}"
    tip = f"{blocks} of the backbone, over the KV cache"
    parts.append(_boxed(x, _BACKBONE, _WIDTH, 22, ("plain", None), blocks, tip, "small"))
    if column.thought is not None:
        parts += _thought(x, column, is_new=is_new)
    return parts


def state_paths(x: float, distances: Sequence[int], *, is_lost: bool) -> list[str]:
    """Returns a list of SVG paths from a column's compression block C to the chunk state S of each later column that
    takes the result. distances: how many places to the right each later column is."""
    start, gutter, y, end = x + _RIGHT + _LEFT + 1, x + _RIGHT + _LEFT + 7, _BLOCKS + 13, _STATE + 13
    rail = _STATE - (9 if is_lost else 5)
    kind = "path lost" if is_lost else "path"
    parts = []
    for distance in distances:
        target = x + distance * PITCH - 3
        route = f"V{end:g}" if distance == 1 else f"V{rail:g}H{target - 6:g}V{end:g}"
        head = f"M{target - 4:g} {end - 4:g} {target:g} {end:g} {target - 4:g} {end + 4:g}"
        parts.append(f'<path d="M{start:g} {y:g}H{gutter:g}{route}H{target:g}{head}" class="{kind}"/>')
    return parts


def gap_strokes(x: float, hidden: Sequence[Column], *, is_filler: bool, leads_on: bool) -> list[str]:
    """Returns a list with one SVG group in the place of chunks that are not drawn: their number, and their positions in
    the hover text. leads_on: the next drawn column takes a chunk state from a hidden chunk."""
    count, centre = len(hidden), x + (GAP_WIDTH - 12) / 2
    label = f"{count} of {visible(hidden[0].tokens[0].text)}" if is_filler else f"{count} more"
    first, last = hidden[0].tokens[0].position, hidden[-1].tokens[-1].position
    tip = f"{counted(count, 'chunk')} not drawn, positions {first} to {last}"
    parts = [
        svg.text(centre, _TOKENS + 20, "⋯", "strong", "middle"),
        svg.text(centre, _TOKENS + 36, shorten(label, 9), "small muted", "middle"),
    ]
    y = _STATE + 13
    if leads_on:
        end = x + GAP_WIDTH - 3
        parts.append(f'<path d="M{x:g} {y:g}H{end - 2:g}" class="path zero"/>')
        parts.append(f'<path d="M{end - 4:g} {y - 4:g} {end:g} {y:g} {end - 4:g} {y + 4:g}" class="path"/>')
    return [_tipped(tip, parts)]


def cache_strokes(ledger: pd.DataFrame) -> list[str]:
    """Returns a list of SVG elements of the KV cache, with an arrow to the backbone."""
    y = _BACKBONE + 11
    cylinder = "".join(cylinder_strokes(["KV cache"], ledger))
    moved = f'<g transform="translate(0 {y - CACHE_HEIGHT / 2:g})">{cylinder}</g>'
    return [moved, svg.arrow(CACHE_WIDTH - 22, y, CACHE_WIDTH - 3, y)]


def _chunk(x: float, column: Column) -> list[str]:
    """Returns SVG elements of a chunk's tokens, one below the other, with the chunk's positions."""
    num_hidden = len(column.tokens) - _MOST_TOKENS if len(column.tokens) > _MOST_TOKENS + 1 else 0
    tokens = column.tokens[: len(column.tokens) - num_hidden]
    lines = len(tokens) + bool(num_hidden)
    y, parts = _TOKENS, [svg.box(x, _TOKENS, _WIDTH, lines * _LINE + 6, "group")]
    for line, token in enumerate(tokens):
        is_prompt = token.kind == "prompt"
        colour = "plain" if is_prompt else "red" if token.kind == "rolled_back" else "blue"
        texture = {"pending": "waiting", "rolled_back": "undone"}.get(token.kind)
        kinds = {"pending": "answer, its cache slot not written yet", "rolled_back": "rolled back"}
        tip = f"position {token.position}: {token.text!r}, {kinds.get(token.kind, token.kind)}"
        top = y + 4 + line * _LINE
        parts.append(_token(x + 4, top, token.text, (colour, texture), tip))
    if num_hidden:
        parts.append(svg.text(x + _WIDTH / 2, y + lines * _LINE, f"+{num_hidden}", "small muted", "middle"))
    first, last = column.tokens[0].position, column.tokens[-1].position
    positions = f"{first}" if first == last else f"{first}–{last}"
    parts.append(svg.text(x + _WIDTH / 2, y + lines * _LINE + 20, positions, "small muted", "middle"))
    return parts


def _state(x: float, column: Column, settings: JsonDict, name: str) -> list[str]:
    """Returns SVG elements of a chunk state: its box, its arrow, and the plus sign at which the chunk state is
    added."""
    y, mid, plus = _STATE, _STATE + 13, x + _RIGHT
    layer_words = "L_in" if settings["l_in"] is None else f"what enters block {settings['l_in']}"
    source = column.source
    first, last = column.tokens[0].position, column.tokens[-1].position
    added = f"S{name} is added to {layer_words} at positions {first} to {last}"
    if source is None:
        kind = "learned" if settings["learned_first_state"] else "zero"
        tip = f"{added}: the first chunk's state is {kind}"
        label_below = [svg.text(x + _LEFT, y + 38, kind, "small muted", "middle")]
    else:
        words = " ".join(visible(token) for token in source.tokens)
        tip = f"{added}\nmade of {words}, the thought of the chunk before ({_passed(source)})\n"
        tip += f"norm {source.state_norm:.3g}"
        label_below = []
    colour = "sand zero" if source is None and not settings["learned_first_state"] else "sand"
    return [
        _boxed(x, y, 2 * _LEFT, 26, (colour, None), f"S{name}", tip),
        *label_below,
        svg.arrow(x + 2 * _LEFT + 1, mid, plus - 10, mid),
        f'<circle cx="{plus:g}" cy="{mid:g}" r="8" class="box plain"/>',
        f'<path d="M{plus - 4:g} {mid:g}h8M{plus:g} {mid - 4:g}v8" class="arrow"/>',
    ]


def _thought(x: float, column: Column, *, is_new: bool) -> list[str]:
    """Returns SVG elements of the thinking block T and the compression block C of one chunk, with their arrows, and of
    the chunk's thought."""
    thought, name = column.thought, subscript(column.chunk + 2)
    fill: Fill = ("red", "undone") if column.is_rolled_back else ("green", None)
    y, left, right = _BLOCKS, x + _LEFT, x + _RIGHT
    read = f"positions {int(thought.start)} to {int(thought.end)}"
    tip_c = f"C, the compression block, makes S{name} of Z{name}: norm {thought.state_norm:.3g}\n{_passed(thought)}"
    tip_t = f"T, the thinking block, writes Z{name} from {read}\n{_passed(thought)}"
    return [
        svg.arrow(left, _BACKBONE - 1, left, y + 28),
        _boxed(x, y, 2 * _LEFT, 26, fill, "T", tip_t),
        _boxed(right - _LEFT, y, 2 * _LEFT, 26, fill, "C", tip_c),
        svg.arrow(left, y - 2, left, 3),
        svg.arrow(right, 1, right, y - 3),
        *_thought_words(x, column, name, is_new=is_new),
    ]


def _thought_words(x: float, column: Column, name: str, *, is_new: bool) -> list[str]:
    """Returns SVG elements of a thought: its words in blue (red if rolled back), its end, and a mark for whether it
    agrees with the true state."""
    thought, is_lost = column.thought, column.is_rolled_back
    chips = [(word, "red" if is_lost else "blue") for word in words_of(thought)]
    chips.append(("<EOS>", "red" if is_lost else "plain") if thought.has_ended else ("cut…", "plain"))
    if len(chips) > _MOST_WORDS + 1:
        chips = [*chips[: _MOST_WORDS - 1], (f"+{len(chips) - _MOST_WORDS}", "plain"), chips[-1]]
    top = -len(chips) * _LINE - 6
    frame, texture = ("red", "undone") if is_lost else ("group", None)
    parts = [svg.box(x, top, _WIDTH, -top, frame + " changed" * is_new, texture)]
    for line, (word, colour) in enumerate(chips):
        parts.append(_token(x + 4, top + 4 + line * _LINE, word, (colour, None)))
    label, classes = (f"Z{name} ✗", "strong red-ink") if is_lost else (f"Z{name}", "strong")
    parts.append(svg.text(x + 2, top - 6, label, classes))
    if pd.notna(thought.agrees):
        parts.append(svg.badge(x + _WIDTH - 4, top + 1, "check" if thought.agrees else "cross"))
    return [_tipped(_thought_tip(thought, name), parts)]


def _thought_tip(thought: TableLine, name: str) -> str:
    """Returns the hover text of a thought: its tokens with their log-probabilities, the true state, and the norm of the
    chunk state made of the thought."""
    read = f"positions {int(thought.start)} to {int(thought.end)}"
    lines = [f"Z{name}, the thought of chunk {int(thought.chunk)} ({read})"]
    lines += [f"{token!r}: {nats:.3g} nats" for token, nats in zip(thought.tokens, thought.logprobs_nats, strict=True)]
    lines.append("has ended" if thought.has_ended else "has not ended: cut at the model's limit")
    if pd.notna(thought.true_state):
        agreement = "says nothing of it" if pd.isna(thought.agrees) else "agrees" if thought.agrees else "disagrees"
        lines.append(f"true state {thought.true_state!r}: {agreement}")
    lines.append(f"norm of its state {thought.state_norm:.3g}")
    lines.append(_passed(thought))
    return "\n".join(lines)


def _passed(thought: TableLine) -> str:
    """Returns text on the request, step, phase and status of a thought."""
    status = thought.status.replace("_", " ")
    return f"request {int(thought.request_id)}, step {int(thought.step)}, {thought.phase}, {status}"


def _token(x: float, y: float, token: str, fill: Fill, tip: str = "") -> str:
    return _boxed(x, y, _CHIP, 17, fill, token_label(token, 9), tip, "token")


def _boxed(
    x: float, y: float, width: float, height: float, fill: Fill, label: str, tip: str, classes: str = "strong"
) -> str:
    """Returns SVG of a box with a text in it; the hover text covers both."""
    halo = f"{classes} halo on-{fill[0].split()[0]}"
    drawn = svg.box(x, y, width, height, *fill, radius=3 if classes == "token" else 5)
    return _tipped(tip, [drawn, svg.text(x + width / 2, y + height / 2 + 4, label, halo, "middle")])


def _tipped(tip: str, parts: Sequence[str]) -> str:
    return f"<g>{f'<title>{markup(tip)}</title>' if tip else ''}{''.join(parts)}</g>"
