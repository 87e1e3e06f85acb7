"""Draws one chunk of a Thinking States model in numbers: its chunk state S, its thought Z, and the norm of the next
chunk's state."""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from cacheprobe.core.values import JsonDict
from cacheprobe.views.diagrams.frame import Markup, TitledPicture
from cacheprobe.views.text import markup, visible
from cacheprobe.views.thoughts.columns import Column, Story, story_of


def thought_card(
    thoughts: pd.DataFrame,
    rows: pd.DataFrame,
    events: pd.DataFrame,
    request_id: int,
    position: int,
    *,
    thinking: JsonDict | None = None,
    step: int | None = None,
    token_texts: Mapping[int, str] | None = None,
) -> Markup:
    """Returns HTML of one chunk of a Thinking States model in numbers, below a list of all thoughts of the request: the
    chunk state S that was added, the thought Z that the thinking block T wrote, and the norm of the next chunk's state.

    thoughts, rows, events: trace.thoughts(), trace.row_table and trace.events().  position: of any token of the chunk;
    for a chunk without a thought, the next chunk with a thought is shown, else the last one.  thinking:
    trace.meta["thinking"].
    step: choose the chunk's thought of this step, if it has one; else the committed thought.
    Raises: ValueError for a request without thoughts or rows.
    """
    story = story_of(thoughts, rows, events, request_id, token_texts)
    title, body = chunk_parts(story, position, thinking or {}, step, tag="span")
    return TitledPicture(title, "", body).alone


def chunk_parts(
    story: Story, position: int, thinking: JsonDict, step: int | None = None, *, tag: str = "button"
) -> tuple[str, str]:
    """Returns (title as plain text, HTML): a button for each thought of a request, and the numbers of the chosen chunk
    (chunk state S, thinking block T, thought Z, compression block C).

    Buttons carry data-position (of the chunk's last token) and data-step. tag: "span" on a page without click handlers.
    story: from `columns.story_of`.  position, step, thinking: as in `thought_card`.
    """
    columns = [column for column in story.columns if column.thought is not None]
    chunk = next((c.chunk for c in columns if position <= c.tokens[-1].position), columns[-1].chunk)
    same_chunk = [c for c in columns if c.chunk == chunk]
    chosen = min(same_chunk, key=lambda c: (c.thought.step != step, c.is_rolled_back))
    buttons = "".join(_button(column, column is chosen, tag) for column in columns)
    thought_text = visible(chosen.thought.said) if chosen.thought.said else "nothing"
    truth = "" if pd.isna(chosen.thought.agrees) else (
        ", which is true" if chosen.thought.agrees else f", and the true state is {visible(chosen.thought.true_state)}"
    )  # fmt: skip
    body = f'<div class="verdicts">{buttons}</div><div class="sites">{_sites(chosen, thinking)}</div>'
    return f"Chunk {chosen.chunk} in numbers: the thought says {thought_text}{truth}", body


def _button(column: Column, is_chosen: bool, tag: str) -> str:
    """Returns HTML of one thought's button: a mark (✓ agrees with the true state, ✗ disagrees or rolled back, ·
    unknown), the chunk's number, and what the thought says."""
    thought = column.thought
    agrees = None if pd.isna(thought.agrees) else bool(thought.agrees)
    css_class, sign = {None: ("", "·"), True: ("kept", "✓"), False: ("lost", "✗")}[agrees]
    if column.is_rolled_back:
        css_class, sign = "lost", "✗"
    thought_text = markup(visible(thought.said)) if thought.said else "nothing"
    chosen_class = " chosen" if is_chosen else ""
    tip = f"request {thought.request_id}, chunk {column.chunk}, positions {thought.start} to {thought.end}\n"
    tip += f"step {thought.step}, {thought.phase}, {thought.status.replace('_', ' ')}"
    return (
        f'<{tag} class="pick verdict {css_class}{chosen_class}" data-position="{column.tokens[-1].position}" '
        f'data-step="{thought.step}" title="{markup(tip)}"><b>{sign}</b> '
        f"{column.chunk} <small>{thought_text}</small></{tag}>"
    )


def _sites(column: Column, thinking: JsonDict) -> str:
    """Returns HTML of one chunk in four sections: the added chunk state S, the thinking block T, the thought Z and the
    compression block C."""
    thought, source = column.thought, column.source
    read = " ".join(markup(visible(token.text)) for token in column.tokens)
    if source is not None and thinking.get("feeds_back", True):
        said = markup(visible(source.said)) or "∅"
        added = f"what the compression block C made of the thought “{said}”; norm {source.state_norm:.2f}"
    else:
        added = "learned" if thinking.get("learned_first_state") else "zero: there was no thought before it"
    about_thought = f"request {thought.request_id}, step {thought.step}, positions {thought.start} to {thought.end}"
    words = " ".join(
        f'<code title="{about_thought}: log p {nats:.2f} nats">{markup(visible(token))} '
        f"<small>{np.exp(nats):.0%}</small></code>"
        for token, nats in zip(thought.tokens, thought.logprobs_nats, strict=True)
    )
    truth = "" if pd.isna(thought.true_state) else (
        f" True state: <b>{markup(thought.true_state)}</b>"
        + ("" if pd.isna(thought.agrees) else ", which it says." if thought.agrees else ", which it does not say.")
    )  # fmt: skip
    l_in, l_out = thinking.get("l_in"), thinking.get("l_out")
    sections = [
        ("S, chunk state", f"added before block {l_in}" if l_in is not None else "added",
         f"{added}. Chunk: <code>{read}</code>"),
        ("T, thinking block", f"reads what leaves block {l_out - 1}" if l_out is not None else "reads",
         f"its first word has an entropy of {thought.entropy_nats:.3f} nats; "
         f"{'it ended by itself' if thought.has_ended else 'it was cut at the limit'}"),
        ("Z, thought", "", f"{words}{truth}"),
        ("C, compression block", "compresses it",
         f"into the state for the next chunk, of norm {thought.state_norm:.2f}"),
    ]  # fmt: skip
    return "".join(
        f"<section><h4>{s} <small>{role}</small></h4><p>{content}</p></section>" for s, role, content in sections
    )
