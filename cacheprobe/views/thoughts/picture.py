"""Draws how a Thinking States model reads one request: its chunks, chunk states, thoughts, and the cache."""

from collections.abc import Iterable, Mapping

import pandas as pd

from cacheprobe.core.values import JsonDict
from cacheprobe.views.diagrams import svg
from cacheprobe.views.diagrams.frame import Markup, legend, picture_alone
from cacheprobe.views.text import visible
from cacheprobe.views.thoughts.columns import Story, changes_of_mind, chosen, finding, story_of
from cacheprobe.views.thoughts.strokes import (
    CACHE_WIDTH,
    GAP_WIDTH,
    MARGIN,
    PITCH,
    cache_strokes,
    column_strokes,
    gap_strokes,
    heights,
    level_strokes,
    state_paths,
)

_BOXES = (
    (("sand",), "S, the state added to a chunk"),
    (("green",), "T (thinking block) writes the thought, C (compression block) makes the next state of it"),
    (("blue",), "Z, what is thought; and the answer"),
    (("group changed",), "a change of mind"),
    (("blue", "waiting"), "committed, cache slot not written yet"),
)
"""Legend: colour and texture of a box, and its meaning."""
MOST_PLACES = 13
"""Largest number of chunks in one picture, gaps included."""
THOUGHT_COLUMNS = ["chunk", "read", "thought", "log-probability, nats", "true state", "agrees", "norm", "status"]
"""Names of the columns of `thought_lines`."""


def thoughts_picture(
    thoughts: pd.DataFrame,
    rows: pd.DataFrame,
    events: pd.DataFrame,
    ledger: pd.DataFrame,
    request_id: int = 0,
    *,
    thinking: JsonDict | None = None,
    token_texts: Mapping[int, str] | None = None,
) -> Markup:
    """Returns HTML of a Thinking States model's thoughts about one request: a column for each chunk (at most 13 are
    drawn), with its tokens, the chunk state S that was added, and the thought Z that the thinking block wrote about the
    chunk. The KV cache is on the left.

    From the bottom: the tokens in chunks, and the chunk state S that is added to each chunk at L_in. Above: the
    thinking block T, which writes the chunk's thought Z at L_out, and the compression block C, which turns Z into the
    next chunk's S. S and Z are numbered as in the paper, from 1: the thought of the first chunk is Z_2. Hover texts
    hold the values. Rolled-back thoughts are columns of their own.

    thoughts, rows, events, ledger: trace.thoughts(), trace.row_table, trace.events() and trace.ledger(request_id).
    thinking: trace.meta["thinking"]; by default a model that feeds chunk states back and whose S_1 is zero.
    token_texts: of tokens that neither rows nor thoughts name, such as the last one committed; from `token_texts`.
    Raises: ValueError for a request without thoughts or rows.
    Source: figure of Thinking States (arXiv 2602.08332), the coin.
    """
    return picture_of(story_of(thoughts, rows, events, request_id, token_texts), ledger, thinking)


def picture_of(story: Story, ledger: pd.DataFrame, thinking: JsonDict | None = None) -> Markup:
    """Returns HTML of a request's thoughts. ledger, thinking: as in `thoughts_picture`."""
    settings = {"l_in": None, "l_out": None, "feeds_back": True, "learned_first_state": False, **(thinking or {})}
    title, shown, keys = finding(story), chosen(story, MOST_PLACES), _keys(story)
    picture, note = _picture(story, shown, ledger, settings, title), _notes(story, shown, settings)
    scrolled = '<div class="scroll thoughts" tabindex="0" role="group" aria-label="chunks, states and thoughts">'
    return Markup.of(
        title, f"{scrolled}{picture}</div>", note, legend(keys), lambda: picture_alone(title, picture, keys, note)
    )


def thought_lines(story: Story) -> list[list[object]]:
    """Returns a list with a list of values for each thought: chunk, tokens read, words, log-probability of the whole
    thought in nats, true state, whether the thought agrees, norm of the chunk state made of the thought, status."""
    lines: list[list[object]] = []
    for column in story.columns:
        thought = column.thought
        if thought is None:
            continue
        words = _spaced(thought.tokens) + ("" if thought.has_ended else " (cut at the limit)")
        truth = "—" if pd.isna(thought.true_state) else thought.true_state
        agrees = "—" if pd.isna(thought.agrees) else "yes" if thought.agrees else "no"
        said = [int(thought.chunk), _spaced(token.text for token in column.tokens), words]
        numbers = [float(sum(thought.logprobs_nats)), truth, agrees, float(thought.state_norm)]
        lines.append([*said, *numbers, thought.status.replace("_", " ")])
    return lines


def _spaced(tokens: Iterable[str]) -> str:
    return " ".join(visible(token) for token in tokens)


def _picture(story: Story, shown: list[int | range], ledger: pd.DataFrame, settings: JsonDict, title: str) -> str:
    above, below = heights([story.columns[item] for item in shown if isinstance(item, int)])
    parts, x = [], float(CACHE_WIDTH)
    width = x + sum(PITCH if isinstance(item, int) else GAP_WIDTH for item in shown) + MARGIN
    parts += level_strokes(x, width, settings)
    parts += cache_strokes(ledger)
    changes = set(changes_of_mind(story.columns)[1:])
    for item in shown:
        if isinstance(item, range):
            is_filler = item.stop <= story.num_filler
            next_column = story.columns[item.stop] if item.stop < len(story.columns) else None
            leads_on = settings["feeds_back"] and next_column is not None and next_column.source is not None
            hidden = [story.columns[i] for i in item]
            parts += gap_strokes(x, hidden, is_filler=is_filler, leads_on=leads_on)
            x += GAP_WIDTH
            continue
        column = story.columns[item]
        parts += column_strokes(x, column, settings, is_new=item in changes)
        if settings["feeds_back"] and column.thought is not None:
            parts += state_paths(x, _distances_fed(story, shown, item), is_lost=column.is_rolled_back)
        x += PITCH
    label = f"Thinking States: {len(story.columns)} chunks. {title}"
    moved = f'<g transform="translate(0 {above:g})">{"".join(parts)}</g>'
    style = f"min-width:{0.96 * width:.0f}px;max-width:{1.1 * width:.0f}px"
    return svg.picture(width, above + below, label, [moved], style=style)


def _distances_fed(story: Story, shown: list[int | range], index: int) -> list[int]:
    """Returns a list of distances, in drawn places, from the column `index` to each later place, up to the next gap,
    whose chunk state was made of the column's thought."""
    own_thought, distances = story.columns[index].thought.thought, []
    for distance, later in enumerate(shown[shown.index(index) + 1 :], 1):
        hidden = later if isinstance(later, range) else range(later, later + 1)
        if any(story.columns[i].source is not None and story.columns[i].source.thought == own_thought for i in hidden):
            distances.append(distance)
        if isinstance(later, range):
            break
    return distances


def _notes(story: Story, shown: list[int | range], settings: JsonDict) -> str:
    columns = story.columns
    notes = []
    drawn = sum(isinstance(place, int) for place in shown)
    if drawn < len(columns):
        notes.append(f"{drawn} of {len(columns)} chunks are drawn, changes of mind before others.")
    if story.num_filler:
        count = story.num_filler
        notes.append(f"The first {f'{count} chunks hold' if count > 1 else 'chunk holds'} only filler.")
    if not settings["feeds_back"]:
        notes.append("This model adds no state to the next chunk: its thoughts are written and not read.")
    elif settings["learned_first_state"]:
        notes.append("S₁ is learned.")
    else:
        notes.append("S₁ is zero.")
    lost = sum(column.is_rolled_back for column in columns)
    if lost:
        notes.append(f"{lost} thought{'s were' if lost > 1 else ' was'} made of tokens that were rolled back.")
    return " ".join(notes)


def _keys(story: Story) -> list[tuple[str, str]]:
    items = [(svg.swatch(1, 2, *fill), meaning) for fill, meaning in _BOXES]
    thoughts = [column.thought for column in story.columns if column.thought is not None]
    if any(pd.notna(thought.agrees) for thought in thoughts):
        items.append((svg.mark(10, 8.5, "check", 0.9), "agrees with the true state"))
        items.append((svg.mark(10, 8.5, "cross", 0.9), "disagrees"))
    if any(column.is_rolled_back for column in story.columns):
        items.append((svg.swatch(1, 2, "red", "undone"), "rolled back"))
    return items
