"""Cuts one request into chunks, the columns of a picture: input tokens, added state, thought."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pandas as pd

from cacheprobe.core.values import TableLine
from cacheprobe.plots.text import text_of


class Token(NamedTuple):
    """A token of a chunk, with its position."""

    position: int
    text: str
    kind: str
    """prompt, answer, pending (committed, its cache row not written yet) or rolled_back."""


@dataclass(frozen=True, slots=True)
class Column:
    """Holds one column of the picture: a committed or rolled-back chunk, its thought, and the thought whose state was
    added to it."""

    chunk: int
    """Number of the chunk, from 0, as in the thoughts table; the paper's number is one more."""
    tokens: tuple[Token, ...]
    is_rolled_back: bool = False
    thought: TableLine = None
    """Its line of the thoughts table; None if the chunk has no thought."""
    source: TableLine = None
    """The thought whose state is added to this chunk; None for the first chunk, and if no state is added."""

    @property
    def has_answer(self) -> bool:
        """Whether the chunk holds generated tokens."""
        return any(token.kind != "prompt" for token in self.tokens)


class Story(NamedTuple):
    """All columns of a request, with the tokens of its answer."""

    columns: list[Column]
    num_filler: int
    """Number of leading columns that hold only one repeated token, such as pads, and have no words in their
    thoughts."""
    answer: tuple[str, ...]
    """Texts of the committed tokens, without the end token."""


def own_thoughts(thoughts: pd.DataFrame, request_id: int) -> pd.DataFrame:
    """Returns the thoughts of one request. Raises: ValueError for a request without thoughts, naming those that have
    some.
    """
    own = thoughts[thoughts.request_id == request_id]
    if own.empty:
        having = sorted({int(r) for r in thoughts.request_id})
        raise ValueError(f"request {request_id} wrote no thoughts; requests {having} did")
    return own


def story_of(
    thoughts: pd.DataFrame,
    rows: pd.DataFrame,
    events: pd.DataFrame,
    request_id: int,
    token_texts: Mapping[int, str] | None = None,
) -> Story:
    """Cuts a request's tokens into chunks, and adds to each the thought about it and the thought that acts on it.

    A rolled-back chunk comes before the committed chunk in its place.
    Raises: ValueError for a request without thoughts or rows.
    """
    own = own_thoughts(thoughts, request_id)
    fed = rows[rows.request_id == request_id].sort_values("step", kind="stable")
    if fed.empty:
        raise ValueError(f"no rows of request {request_id}; give trace.row_table or trace.rows({request_id})")
    size = int(own.end.iloc[0] - own.start.iloc[0]) + 1
    answer_ids = [int(t) for step in events[events.request_id == request_id].committed_token_ids for t in step]
    sequence = _sequence(fed, answer_ids, {**_texts(thoughts, rows), **(token_texts or {})})
    columns = []
    for chunk in range(-(-len(sequence) // size)):
        tokens = tuple(sequence[chunk * size : (chunk + 1) * size])
        mine, before = own[own.chunk == chunk], own[own.chunk == chunk - 1]
        for lost in mine[mine.status == "rolled_back"].itertuples():
            earlier = before[before.step <= lost.step]
            columns.append(Column(chunk, _as_read(fed, lost), True, lost, _last(earlier)))
        columns.append(Column(chunk, tokens, False, _last(mine, "committed"), _last(before, "committed")))
    ends = _end_ids(own)
    generated = sequence[len(sequence) - len(answer_ids) :]
    answer = tuple(token.text for token, i in zip(generated, answer_ids, strict=True) if i not in ends)
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
    """Returns the tokens that a thought was made from, even if other tokens were committed in their place later."""
    seen = fed[(fed.position >= thought.start) & (fed.position <= thought.end) & (fed.step <= thought.step)]
    seen = seen.drop_duplicates("position", keep="last").sort_values("position")
    kinds = {"prompt": "prompt", "rolled_back": "rolled_back"}
    return tuple(Token(int(row.position), row.token, kinds.get(row.role, "answer")) for row in seen.itertuples())


def _texts(thoughts: pd.DataFrame, rows: pd.DataFrame) -> dict[int, str]:
    texts = dict(zip(rows.token_id.tolist(), rows.token.tolist(), strict=True))
    for thought in thoughts.itertuples():
        texts |= dict(zip((int(i) for i in thought.token_ids), thought.tokens, strict=True))
    return texts


def _end_ids(own: pd.DataFrame) -> set[int]:
    return {int(thought.token_ids[-1]) for thought in own[own.has_ended].itertuples()}


def _last(thoughts: pd.DataFrame, status: str | None = None) -> TableLine:
    found = thoughts[thoughts.status == status] if status else thoughts
    return None if found.empty else next(found.iloc[[-1]].itertuples())


def _num_filler(columns: Sequence[Column]) -> int:
    first, count = columns[0].tokens[0].text, 0
    for column in columns[:-1]:
        if any(token.text != first or token.kind != "prompt" for token in column.tokens):
            break
        if column.thought is not None and words_of(column.thought):
            break
        count += 1
    return count if count > 1 or len(columns[0].tokens) > 1 else 0


def words_of(thought: TableLine) -> tuple[str, ...]:
    """Returns the thought's tokens as texts, without its end token; () for an empty thought."""
    tokens = list(thought.tokens)
    return tuple(tokens[:-1] if thought.has_ended else tokens)


def changes_of_mind(columns: Sequence[Column]) -> list[int]:
    """Returns the indices in `columns` whose thought differs from the last non-empty one; the first is included.

    Rolled-back columns are skipped.
    """
    found, last_words = [], None
    for place, column in enumerate(columns):
        words = words_of(column.thought) if column.thought is not None and not column.is_rolled_back else ()
        if words and words != last_words:
            found.append(place)
            last_words = words
    return found


def chosen(story: Story, most: int) -> list[int | range]:
    """Returns which columns to draw in `most` places: their indices, and a range for each gap.

    Priority: the end of the prompt, the start of the answer, changes of mind and rolled-back columns; then thoughts
    that disagree with the true state; then the rest in reading order.
    """
    columns, filler = story.columns, story.num_filler
    every = list(range(filler, len(columns)))
    changes = changes_of_mind(columns)
    answers = [place for place in every if columns[place].has_answer]
    before_answer = [place for place in every if not columns[place].has_answer][-1:]
    from_ends = [x for pair in zip(changes, reversed(changes), strict=True) for x in pair]
    lost = [place for place in every if columns[place].is_rolled_back]
    wrong = [place for place in every if _disagrees(columns[place])]
    order = [*every[:1], *before_answer, *answers[:1], *from_ends, *lost, *wrong]
    order += [place for place in every if place not in answers] + answers
    kept: set[int] = set()
    for place in dict.fromkeys(order):
        if place in every and len(_placed(kept | {place}, len(columns))) <= most:
            kept.add(place)
    return _placed(kept, len(columns))


def _placed(kept: set[int], count: int) -> list[int | range]:
    placed: list[int | range] = []
    previous = -1
    for index in [*sorted(kept), count]:
        if index - previous > 1:
            placed.append(range(previous + 1, index))
        if index < count:
            placed.append(index)
        previous = index
    return placed


def _disagrees(column: Column) -> bool:
    return column.thought is not None and pd.notna(column.thought.agrees) and not column.thought.agrees
