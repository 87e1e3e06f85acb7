"""Cuts one request of a Thinking States model into chunks, the columns of a picture: input tokens, added chunk state,
thought; and writes the sentence above the picture."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pandas as pd

from cacheprobe.core.values import TableLine
from cacheprobe.views.text import plain, shorten, text_of


class Token(NamedTuple):
    """Holds one token of a chunk: its position, text and kind."""

    position: int
    text: str
    kind: str
    """"prompt", "answer" (generated), "pending" (generated, its cache slot not written yet) or "rolled_back"."""


@dataclass(frozen=True, slots=True)
class Column:
    """Holds one column of the thoughts picture: a committed or rolled-back chunk, its thought, and the thought of the
    chunk before."""

    chunk: int
    """Number of the chunk, from 0, as in the thoughts table; the paper's number is one more."""
    tokens: tuple[Token, ...]
    is_rolled_back: bool = False
    thought: TableLine = None
    """The chunk's line of the thoughts table; None if the chunk has no thought."""
    source: TableLine = None
    """The thought of the chunk before, as a line of the thoughts table: a model that feeds states back makes this
    chunk's state of that thought. None if the chunk before has no such thought, and for the first chunk."""

    @property
    def has_answer(self) -> bool:
        """True if the chunk has tokens after the prompt."""
        return any(token.kind != "prompt" for token in self.tokens)


class Story(NamedTuple):
    """Holds all columns of one request's thoughts picture, and the texts of the request's generated tokens."""

    columns: list[Column]
    num_filler: int
    """Number of leading columns that hold only one repeated token, such as pads, and whose thoughts have no words."""
    answer: tuple[str, ...]
    """Texts of the generated tokens, without the end token."""


def story_of(
    thoughts: pd.DataFrame,
    rows: pd.DataFrame,
    events: pd.DataFrame,
    request_id: int,
    token_texts: Mapping[int, str] | None = None,
) -> Story:
    """Cuts a request's tokens into chunks, and returns a `Story`: for each chunk its tokens, the thought about the
    chunk, and the thought about the chunk before. A rolled-back chunk comes before the committed chunk that replaced
    it.

    Raises: ValueError for a request without thoughts or rows.
    """
    own_lines = thoughts[thoughts.request_id == request_id]
    if own_lines.empty:
        others = sorted({int(r) for r in thoughts.request_id})
        raise ValueError(f"request {request_id} wrote no thoughts; requests {others} did")
    fed_rows = rows[rows.request_id == request_id].sort_values("step", kind="stable")
    if fed_rows.empty:
        raise ValueError(f"no rows of request {request_id}; give trace.row_table or trace.rows({request_id})")
    size = int(own_lines.end.iloc[0] - own_lines.start.iloc[0]) + 1
    answer_ids = [int(t) for step in events[events.request_id == request_id].committed_token_ids for t in step]
    sequence = _sequence(fed_rows, answer_ids, {**_texts(thoughts, rows), **(token_texts or {})})
    columns = []
    for chunk in range(-(-len(sequence) // size)):
        tokens = tuple(sequence[chunk * size : (chunk + 1) * size])
        of_chunk, of_chunk_before = own_lines[own_lines.chunk == chunk], own_lines[own_lines.chunk == chunk - 1]
        for rolled_back in of_chunk[of_chunk.status == "rolled_back"].itertuples():
            seen_before = of_chunk_before[of_chunk_before.step <= rolled_back.step]
            columns.append(Column(chunk, _as_read(fed_rows, rolled_back), True, rolled_back, _last(seen_before)))
        columns.append(Column(chunk, tokens, False, _last(of_chunk, "committed"), _last(of_chunk_before, "committed")))
    end_ids = {int(thought.token_ids[-1]) for thought in own_lines[own_lines.has_ended].itertuples()}
    generated = sequence[len(sequence) - len(answer_ids) :]
    answer = tuple(token.text for token, i in zip(generated, answer_ids, strict=True) if i not in end_ids)
    return Story(columns, _num_filler(columns), answer)


def _sequence(fed: pd.DataFrame, answer_ids: Sequence[int], texts: dict[int, str]) -> list[Token]:
    prompt = fed[fed.role == "prompt"].drop_duplicates("position", keep="last").sort_values("position")
    sequence = [Token(int(row.position), row.token, "prompt") for row in prompt.itertuples()]
    written = set(fed[fed.status == "committed"].position.tolist())
    for position, token_id in enumerate(answer_ids, len(sequence)):
        kind = "answer" if position in written else "pending"
        sequence.append(Token(position, text_of(texts, token_id), kind))
    return sequence


def _as_read(fed: pd.DataFrame, thought: TableLine) -> tuple[Token, ...]:
    """Returns a tuple of Token: the tokens of which a thought was made, even if other tokens replaced them later."""
    rows_read = fed[(fed.position >= thought.start) & (fed.position <= thought.end) & (fed.step <= thought.step)]
    rows_read = rows_read.drop_duplicates("position", keep="last").sort_values("position")
    kinds = {"prompt": "prompt", "rolled_back": "rolled_back"}
    return tuple(Token(int(row.position), row.token, kinds.get(row.role, "answer")) for row in rows_read.itertuples())


def _texts(thoughts: pd.DataFrame, rows: pd.DataFrame) -> dict[int, str]:
    texts = dict(zip(rows.token_id.tolist(), rows.token.tolist(), strict=True))
    for thought in thoughts.itertuples():
        texts |= dict(zip((int(i) for i in thought.token_ids), thought.tokens, strict=True))
    return texts


def _last(thoughts: pd.DataFrame, status: str | None = None) -> TableLine:
    matching = thoughts[thoughts.status == status] if status else thoughts
    return None if matching.empty else next(matching.iloc[[-1]].itertuples())


def _num_filler(columns: Sequence[Column]) -> int:
    """Returns the number of leading columns that hold only one repeated prompt token and whose thoughts have no
    words."""
    first_text, count = columns[0].tokens[0].text, 0
    for column in columns[:-1]:
        if any(token.text != first_text or token.kind != "prompt" for token in column.tokens):
            break
        if column.thought is not None and words_of(column.thought):
            break
        count += 1
    return count if count > 1 or len(columns[0].tokens) > 1 else 0  # one token alone is not filler


def words_of(thought: TableLine) -> tuple[str, ...]:
    """Returns the texts of a thought's tokens without its end token, as a tuple; () for an empty thought."""
    tokens = list(thought.tokens)
    return tuple(tokens[:-1] if thought.has_ended else tokens)


def changes_of_mind(columns: Sequence[Column]) -> list[int]:
    """Returns a list of indices: the columns whose thought has other words than the previous thought with words. The
    first thought with words is included; empty thoughts and rolled-back columns are left out."""
    changes, last_words = [], None
    for index, column in enumerate(columns):
        words = words_of(column.thought) if column.thought is not None and not column.is_rolled_back else ()
        if words and words != last_words:
            changes.append(index)
            last_words = words
    return changes


def chosen(story: Story, most: int) -> list[int | range]:
    """Returns a list of the columns to draw in at most `most` places: an index for a column, a range of indices for a
    gap. Filler columns (the first `story.num_filler`: one repeated token, such as pads, and no words thought) are
    always in gaps.

    Priority: the first column after the filler, the end of the prompt, the first generated token, changes of mind
    (thoughts with other words than the thought before) and rolled-back columns; then thoughts that disagree with the
    true state; then the rest in reading order.
    """
    columns, filler = story.columns, story.num_filler
    not_filler = list(range(filler, len(columns)))
    changes = changes_of_mind(columns)
    answers = [index for index in not_filler if columns[index].has_answer]
    before_answer = [index for index in not_filler if not columns[index].has_answer][-1:]
    from_ends = [x for pair in zip(changes, reversed(changes), strict=True) for x in pair]
    rolled_back = [index for index in not_filler if columns[index].is_rolled_back]
    thoughts = [column.thought for column in columns]
    has_truth = [thought is not None and pd.notna(thought.agrees) for thought in thoughts]
    disagreeing = [index for index in not_filler if has_truth[index] and not thoughts[index].agrees]
    order = [*not_filler[:1], *before_answer, *answers[:1], *from_ends, *rolled_back, *disagreeing]
    order += [index for index in not_filler if index not in answers] + answers
    kept: set[int] = set()
    for index in dict.fromkeys(order):
        if index in not_filler and len(_placed(kept | {index}, len(columns))) <= most:
            kept.add(index)
    return _placed(kept, len(columns))


def _placed(kept: set[int], count: int) -> list[int | range]:
    """Returns the kept indices in order, with a range of indices in place of each run of columns that is left out."""
    placed: list[int | range] = []
    previous = -1
    for index in [*sorted(kept), count]:
        if index - previous > 1:
            placed.append(range(previous + 1, index))
        if index < count:
            placed.append(index)
        previous = index
    return placed


def finding(story: Story) -> str:
    """Returns one or two sentences as plain text on a request's thoughts: how often the thought changes, the generated
    text, and, if any, the number of thoughts that disagree with the true state."""
    thoughts = [c.thought for c in story.columns if c.thought is not None and not c.is_rolled_back]
    while_reading = "while the prompt is read"
    if any(thought.phase != "prefill" for thought in thoughts):
        while_reading += " and the answer written"
    path = [words_of(story.columns[place].thought) for place in changes_of_mind(story.columns)]
    answer = _quoted(story.answer)
    if not path:
        sentence = f"Every thought is empty {while_reading}" + (f"; the answer is {answer}" if story.answer else "")
    else:
        count = len(path) - 1
        sentence = f"The thought says {_quoted(path[0])} and never changes its mind {while_reading}"
        if count:
            times = {1: "once", 2: "twice"}.get(count, f"{count} times")
            sentence = f"The thought changes its mind {times} {while_reading}: {_path(path)}"
        if not story.answer:
            sentence += f"; it ends on {_quoted(path[-1])}"
        elif _is_about(path[-1], story.answer):
            sentence += f"; it ends on the answer, {answer}"
        else:
            sentence += f"; it ends on {_quoted(path[-1])}, and the answer is {answer}"
    if not story.answer:
        sentence += ", and there is no answer"
    known = [thought for thought in thoughts if pd.notna(thought.agrees)]
    wrong = sum(not thought.agrees for thought in known)
    truth = _final_state(story)
    if truth is not None and len(story.answer) == 1 and story.answer[0].strip() != truth:
        sentence += f", which is wrong: the true state is {_short(truth)}"
    if wrong:
        sentence += f". {wrong} of {len(known)} thoughts disagree{'s' * (wrong == 1)} with the true state"
    return sentence


def _final_state(story: Story) -> str | None:
    """Returns the true state of the thought about the last chunk before the answer as text; None if it is unknown or
    not one word."""
    prompt_columns = [column for column in story.columns if not column.has_answer]
    thought = prompt_columns[-1].thought if prompt_columns else None
    if thought is None or pd.isna(thought.true_state) or len(thought.true_state.split()) != 1:
        return None
    return thought.true_state


def _is_about(words: Sequence[str], answer: Sequence[str]) -> bool:
    """Returns True if the generated tokens (`answer`) start with the thought's words, or if the thought ends with the
    generated tokens."""
    thought_words, answer_words = ([text.strip() for text in texts] for texts in (words, answer))
    return answer_words[: len(thought_words)] == thought_words or thought_words[-len(answer_words) :] == answer_words


def _path(path: Sequence[Sequence[str]]) -> str:
    """Returns the thoughts as one text, joined by arrows; of more than seven, the first three and the last three."""
    steps = [_quoted(words) for words in path]
    if len(steps) > 7:
        steps = [*steps[:3], "…", *steps[-3:]]
    return " → ".join(steps)


def _quoted(words: Sequence[str]) -> str:
    return _short(" ".join(word.strip() or word for word in words))


def _short(text: str) -> str:
    return shorten(plain(text), 24)
