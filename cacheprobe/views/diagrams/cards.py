"""Draws cards as HTML: of one row (each layer's most likely tokens, prediction depth, verdict), and of one chunk of a
Thinking States model (chunk state, thought, norm)."""

from collections.abc import Mapping, Sequence
from typing import SupportsIndex

import numpy as np
import pandas as pd

from cacheprobe.analysis.measures import prediction_depth
from cacheprobe.core.records import DISCARDED_DRAFT, HEAD_PHASE
from cacheprobe.core.values import JsonDict, TableLine
from cacheprobe.trace.tables.token_history import TokenOutcome, outcomes_at, outcomes_of_row, token_history
from cacheprobe.views.diagrams.frame import Markup
from cacheprobe.views.diagrams.lens_grid import reads_and_predicts
from cacheprobe.views.report.insight import insight
from cacheprobe.views.text import counted, markup, text_of, token_label, visible
from cacheprobe.views.text import token_texts as known_texts
from cacheprobe.views.thoughts.columns import Column, Story, story_of

_COLUMNS = 7
"""Largest width of a token in the table of layers, in columns of a monospaced font."""
_SIGNS = {"accepted": "✓", "rejected": "✗", "unverified": "–"}
"""What a line of the draft head shows of its verdict."""
_VERDICTS = {"committed": "committed as computed", "abandoned": "abandoned before a verdict"}


def token_card(
    hypotheses: pd.DataFrame,
    rows: pd.DataFrame,
    events: pd.DataFrame,
    request_id: int,
    position: int,
    *,
    row: int | None = None,
    token_texts: Mapping[int, str] | None = None,
    history: pd.DataFrame | None = None,
) -> Markup:
    """Returns HTML of one row's card: each layer's most likely tokens, the prediction depth (the first layer from which
    the first choice stays), and the tokens drafted and committed at the next position.

    hypotheses, rows, events: trace.hypotheses() (with include_rolled_back=True for rolled-back and abandoned rows),
    trace.row_table and trace.events(). With include_head=True the card also shows what the draft head read there.
    row: number of a superseded, rolled-back or abandoned row of this position; by default the committed row.
    token_texts: from `token_texts`; tokens that no table names are shown as "<id>".
    history: of the request, as `token_history` gives it, if it is known; the card then has no note.
    Raises: ValueError if the row has no reading.
    """
    in_table = hypotheses[hypotheses.request_id == request_id]
    drafting = in_table[(in_table.phase == HEAD_PHASE) & (in_table.position == position) & in_table.verdict.notna()]
    in_table = in_table[in_table.phase != HEAD_PHASE]
    readings = in_table[(in_table.position == position) & (in_table.site != "thought")]
    readings = readings[(readings.status == "committed") if row is None else (readings.row == row)]
    if readings.empty:
        available = f"the table has requests {sorted(hypotheses.request_id.unique().tolist())}"
        if len(in_table):
            available = f"it has positions {in_table.position.min()} to {in_table.position.max()}"
        of_row = f"{'canonical row' if row is None else f'row {row}'} of request {request_id} at position {position}"
        raise ValueError(f"there is no reading of a {of_row}; {available}")
    of_request = rows[rows.request_id == request_id]
    generated_index = position - int(of_request[of_request.role == "prompt"].position.max())
    known = history
    history = token_history(events[events.request_id == request_id]) if known is None else known
    texts = known_texts(rows, hypotheses) if token_texts is None else token_texts
    input_token = of_request[of_request.row == readings.row.iloc[0]].token.iloc[0]
    outcomes = outcomes_at(history, generated_index)
    if row is not None:
        outcomes = outcomes_of_row(outcomes, int(readings.step.iloc[0]))
        drafting = drafting[drafting.step.isin([outcome.born for outcome in outcomes])]
    depth = prediction_depth(readings).iloc[0].to_dict()
    table = readings.sort_values("layer", ascending=False)
    line = table.iloc[0]
    rows_here = of_request[of_request.position == position]
    has_note = known is None and not (readings.status != "committed").any()
    note = f"{markup(insight(readings, rows_here, outcomes, texts))}." if has_note else ""
    if line.status in DISCARDED_DRAFT:
        outcomes = ()  # the next token was committed after another text
    body = f'<dl class="facts">{_facts(line, depth, outcomes, texts, input_token)}</dl>'
    body += _head_table(drafting, int(line.layer) + 1, texts) if len(drafting) else ""
    body += _layer_table(table, texts)
    return Markup.of(_title(line, depth), body, note)


def _facts(
    line: TableLine, depth: JsonDict, outcomes: Sequence[TokenOutcome], texts: Mapping[int, str], input_token: str
) -> str:
    """Returns HTML of the facts of one row. line: a reading of the row.  depth: its line of
    `analysis.measures.prediction_depth`.  outcomes: the tokens drafted and committed at the next position, in order."""
    read = f"<code>{markup(visible(input_token))}</code> at position {line.position} of request {line.request_id}"
    facts = [("read", read), ("predicts", f"position {line.position + 1}")]
    facts.append(("row", f"{markup(line.status.replace('_', ' '))}, {markup(line.phase)} in step {line.step}"))
    for outcome in outcomes:
        name = "draft" if outcome.outcome in DISCARDED_DRAFT else "next token"
        facts.append((name, _outcome_text(outcome, texts)))
    flips = int(depth["num_flips"])
    changes = "no change" if not flips else f"{counted(flips, 'change')} of first choice"
    facts.append(("prediction depth", f"from layer {depth['prediction_depth']} on, after {changes}"))
    facts.append(("path", f"<code>{markup(depth['path'])}</code>"))
    return "".join(f"<div><dt>{name}</dt><dd>{text}</dd></div>" for name, text in facts)


def _title(line: TableLine, depth: JsonDict) -> str:
    final_token = visible(line.token)
    depth_layer = depth["prediction_depth"]
    if line.status in DISCARDED_DRAFT:
        fed = "a rejected token, or one after it" if line.status == "rolled_back" else "a draft that was abandoned"
        return f"This row was fed {fed}; it predicted “{final_token}” from layer {depth_layer} on"
    if pd.isna(line.committed_token_id):
        return f"“{final_token}” is the last word of a row after which nothing was committed"
    committed = visible(line.committed_token)
    if bool(line.agrees):
        return f"“{committed}” was committed, and decided at layer {depth_layer}"
    return f"“{committed}” was committed; this row said “{final_token}” from layer {depth_layer} on"


def _outcome_text(outcome: TokenOutcome, token_texts: Mapping[int, str]) -> str:
    """Returns HTML on one token drafted or committed at the next position: its text, its verdict, and the steps that
    drafted and judged it."""
    token = f"<code>{markup(visible(text_of(token_texts, outcome.token_id)))}</code>"
    if outcome.decided_step is None:
        return f"{token} drafted in step {outcome.born}, not decided"
    word = _VERDICTS.get(str(outcome.outcome), str(outcome.outcome).replace("_", " "))
    css_class, sign = ("lost", "✗") if outcome.outcome in DISCARDED_DRAFT else ("kept", "✓")
    verdict = f'<span class="{css_class}">{sign} {word}</span>'
    if outcome.born == outcome.decided_step:
        return f"{token} {verdict} in step {outcome.decided_step}"
    return f"{token} drafted in step {outcome.born}, {verdict} in step {outcome.decided_step}"


def _layer_table(table: pd.DataFrame, token_texts: Mapping[int, str]) -> str:
    """Returns HTML of a table with a line for each layer: the layer's most likely tokens from left to right, with a
    note. A green frame marks the committed token, unless the row was rolled back or abandoned. table: readings of one
    row, sorted with the last layer first."""
    count = max(len(ids) for ids in table.top_token_ids)
    head = "".join(f"<th>{i + 1}</th>" for i in range(count))
    first_line, lines = table.iloc[0], []
    about_row = f"request {first_line.request_id} · step {first_line.step} · {first_line.phase}"
    about_row += f" · {first_line.status.replace('_', ' ')}"
    about_row += f" · {reads_and_predicts(first_line.position)}"
    has_committed = not pd.isna(first_line.committed_token_id) and first_line.status not in DISCARDED_DRAFT
    for line in table.itertuples():
        marked = line.committed_token_id if has_committed else None
        cells = _cells(line, f"{about_row} · layer {int(line.layer)}", marked, token_texts)
        lines.append(f'<tr data-layer="{int(line.layer)}"><th>{int(line.layer)}</th>{cells}</tr>')
    note = "Most likely tokens by layer, the last layer on top; the stronger the background, the likelier the token."
    if has_committed:
        note += " Framed in green: the committed token."
    return (
        f'<div class="ladder" tabindex="0"><table><thead><tr><th>layer</th>{head}</tr></thead>'
        f'<tbody>{"".join(lines)}</tbody></table></div><p class="note">{note}</p>'
    )


def _head_table(table: pd.DataFrame, first_layer: int, token_texts: Mapping[int, str]) -> str:
    """Returns HTML of a table with a line for each reading of the draft head that predicted this token: its most likely
    tokens from left to right. table: readings of the head's rows.  first_layer: number of the head's first layer."""
    count, lines = max(len(ids) for ids in table.top_token_ids), []
    head = "".join(f"<th>{i + 1}</th>" for i in range(count))
    for line in table.sort_values(["step", "layer"], ascending=[True, False]).itertuples():
        about = f"step {line.step}, token {line.chain_step} of its draft, head layer {int(line.layer) - first_layer}"
        cells = _cells(line, about, line.drafted_token_id, token_texts)
        name = f"{line.step}·{line.chain_step} {_SIGNS[line.verdict]}"
        lines.append(f"<tr><th title='{about}, {line.verdict}'>{name}</th>{cells}</tr>")
    note = "What the draft head read here: step·token of its draft. Framed: the token that it drafted; ✓ accepted, "
    note += "✗ rejected, – unverified."
    return (
        f'<div class="ladder" tabindex="0"><table><thead><tr><th>head</th>{head}</tr></thead>'
        f'<tbody>{"".join(lines)}</tbody></table></div><p class="note">{note}</p>'
    )


def _cells(line: TableLine, about: str, marked: SupportsIndex | None, token_texts: Mapping[int, str]) -> str:
    """Returns HTML of the cells of a reading: its most likely tokens, the likeliest first. about: first line of their
    hover text.  marked: the token with a green frame; None or null for none."""
    cells = []
    for token_id, nats in zip(line.top_token_ids, line.top_logprob_nats, strict=True):
        share = float(np.exp(nats))
        text = text_of(token_texts, int(token_id))
        tip = f"{about}\n{visible(text)}: {share:.1%}, log p {nats:.2f} nats"
        css_class = ' class="right"' if not pd.isna(marked) and int(token_id) == marked else ""
        label = markup(token_label(text, _COLUMNS))
        cells.append(f'<td{css_class} style="--p:{share:.3f}" title="{markup(tip)}">{label}</td>')
    return "".join(cells)


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
    return Markup.of(title, body)


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
