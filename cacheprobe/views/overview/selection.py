"""Chooses lines of the table of all tokens: searches, filters and sorts them."""

import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from cacheprobe.trace.tables.token_table import SearchedText, group_rejections, has_text, searchable
from cacheprobe.views.text import plain

COLUMNS = {
    "verdict": ("verdict", "verdict"),
    "times": ("times", "times"),
    "drafted": ("drafted", "drafted_token"),
    "committed": ("committed", "committed_token"),
    "request": ("request", "request_id"),
    "step": ("step", "step"),
    "position": ("position", "position"),
    "depth": ("prediction depth", "prediction_depth"),
    "first": ("first at layer", "first_at_layer"),
    "drafter": ("first at the drafter’s layer", "first_at_drafter_layer"),
    "disagreement": ("disagreement", "disagreement"),
    "entropy": ("entropy, nats", "entropy_nats"),
    "margin": ("margin, nats", "margin_nats"),
    "logprob": ("log-probability, nats", "logprob_nats"),
}
"""Heading and column of the table, by the key by which it is sorted."""
RANGES = ("depth", "first", "disagreement", "entropy", "margin", "logprob")
"""Keys of the columns that can be limited to a range."""
VERDICTS = ("accepted", "rejected", "recovered", "bonus", "committed")
QUESTIONS = {
    "drafter": ("committed token first at the drafter’s layer", "first_at_drafter_layer.fillna(False)"),
    "otherwise": ("another token first at the drafter’s layer", "~first_at_drafter_layer.fillna(True)"),
    "undecided": ("no layer has the committed token first", "first_at_layer.isna() and prediction_depth.notna()"),
    "late": ("first at the last layer alone", "first_at_layer == first_at_layer.max()"),
}
"""Words and condition on the lines, by the key of a question that the list answers."""
MOST_LETTERS = 200
"""Largest length of a searched text, of a pattern and of a list of requests."""
_RANGE = re.compile(r"[^:]{0,24}:[^:]{0,24}")


class TokenSelection(NamedTuple):
    """Says which tokens the table holds, and in which order. `of` makes one of a question, and checks it."""

    find: str = ""
    """Text that stands at the token, or pattern that the token matches; "" for all."""
    is_pattern: bool = False
    """Whether `find` is a regular expression over single tokens, in the syntax of RE2."""
    verdict: str = ""
    asked: str = ""
    """Key of QUESTIONS; "" for none."""
    requests: tuple[tuple[int, int], ...] = ()
    """First and last id of each range of requests; () for all."""
    ranges: tuple[tuple[str, float | None, float | None], ...] = ()
    """Key of RANGES, least and most, both included, None for no limit. An unknown value is in no range."""
    sort: str = ""
    """Key of COLUMNS, with "-" in front for the largest first; "" for the order of requests and positions."""
    is_each: bool = False
    """Whether each of several equal rejections has a line of its own."""

    @classmethod
    def of(cls, question: Mapping[str, object]) -> "TokenSelection":
        """Returns the selection that a question names. Its values are texts; those that it lacks choose all lines.
        Raises: ValueError for a value of another form, with what it may be."""
        texts = {
            name: question_text(question, name)
            for name in ("find", "way", "verdict", "asked", "requests", "sort", "each")
        }
        for name, known in (
            ("verdict", VERDICTS),
            ("asked", tuple(QUESTIONS)),
            ("way", ("pattern",)),
            ("each", ("1",)),
        ):
            if texts[name] and texts[name] not in known:
                raise ValueError(f"{name} is {' or '.join(known)}, got {texts[name]!r:.40}")
        if texts["sort"] and texts["sort"].removeprefix("-") not in COLUMNS:
            raise ValueError(f"the table is sorted by {', '.join(COLUMNS)}, got {texts['sort']!r:.40}")
        ranges = ((name, *_ends(name, text)) for name in RANGES if (text := question_text(question, name)))
        chosen = cls(
            texts["find"], texts["way"] == "pattern", texts["verdict"], texts["asked"], _ids(texts["requests"]),
            tuple(ranges), texts["sort"], bool(texts["each"]),
        )  # fmt: skip
        if chosen.is_pattern and chosen.find:
            _matches(pa.array([""]), chosen.find)  # a wrong pattern is refused before anything is read
        return chosen

    @property
    def condition(self) -> str:
        """Condition on the lines for `DataFrame.query`, without the searched text; "" for none."""
        parts = [f"verdict == {self.verdict!r}"] if self.verdict else []
        if self.requests:
            ranges = (f"{low} <= request_id <= {high}" for low, high in self.requests)
            parts.append(f"({' or '.join(ranges)})")
        for key, least, most in self.ranges:
            column = COLUMNS[key][1]
            ends = ("" if least is None else f"{column} >= {least}", "" if most is None else f"{column} <= {most}")
            parts += filter(None, ends)
        return " and ".join([*parts, *([QUESTIONS[self.asked][1]] if self.asked else [])])


def selected_tokens(
    lines: pd.DataFrame, selection: TokenSelection, texts: Mapping[int, SearchedText]
) -> pd.DataFrame:  # fmt: skip
    """Returns the lines that the selection holds, in its order; unknown values come last.

    lines: `RunTokens.lines`.  texts: of every request, from `request_texts`.  Raises: ValueError for a wrong pattern.
    """
    condition = selection.condition
    found = lines.query(condition, engine="python") if condition else lines
    if selection.find:
        is_found = _is_match(found, selection.find) if selection.is_pattern else has_text(found, texts, selection.find)
        found = found[is_found]
    column, is_rising = COLUMNS.get(selection.sort.removeprefix("-"), ("", ""))[1], not selection.sort.startswith("-")
    key = _folded if column.endswith("token") else None
    if column not in ("", "times"):  # the first of equal rejections in this order stands for them
        found = found.sort_values(column, kind="stable", ascending=is_rising, key=key)
    found = found if selection.is_each else group_rejections(found)
    return found.sort_values(column, kind="stable", ascending=is_rising) if column == "times" else found


def _folded(tokens: pd.Series) -> pd.Series:
    """Returns what a column of tokens is sorted by."""
    codes, distinct = pd.factorize(tokens)
    order = pd.Series([searchable(token) for token in distinct], dtype="str").rank(method="dense").to_numpy()
    return pd.Series(np.append(order, np.nan)[codes], tokens.index)


def code_of(selection: TokenSelection) -> list[str]:
    """Returns the lines of Python that make a table of the same lines of a `trace`, and name it `table`."""
    condition, column = selection.condition, COLUMNS.get(selection.sort.removeprefix("-"), ("", ""))[1]
    code = ["table = cp.analysis.token_table(trace)"]
    code += [f'table = table.query({condition!r}, engine="python")'] if condition else []
    if selection.find and not selection.is_pattern:
        code += [f"table = cp.analysis.tokens_with_text(trace, table, {selection.find!r})"]
    if selection.find and selection.is_pattern:
        code += [
            "texts = table[['committed_token', 'drafted_token']].replace('␣', ' ', regex=True)",
            f"is_match = texts.apply(lambda tokens: tokens.str.contains({selection.find!r}, na=False))",
            "table = table[is_match.any(axis=1)]",
        ]
    grouping = [] if selection.is_each else ["table = cp.analysis.group_rejections(table)"]
    as_text = ", key=lambda texts: texts.str.replace('␣', ' ').str.casefold()" if column.endswith("token") else ""
    is_rising = not selection.sort.startswith("-")
    order = [f'table = table.sort_values({column!r}, kind="stable", ascending={is_rising}{as_text})'] if column else []
    return [*code, *(grouping + order if column == "times" else order + grouping), "table"]


def _is_match(lines: pd.DataFrame, pattern: str) -> np.ndarray:
    """Returns an array of bool for the lines: whether the committed or the draft token matches a pattern."""
    found = np.zeros(len(lines), dtype=bool)
    for name in ("committed_token", "drafted_token"):
        codes, tokens = pd.factorize(lines[name])
        is_match = _matches(pa.array([plain(token) for token in tokens], pa.string()), pattern)
        found |= np.append(is_match, False)[codes]  # a missing token has code -1
    return found


def _matches(texts: pa.Array, pattern: str) -> np.ndarray:
    """Returns an array of bool: which of the texts a pattern of RE2 matches somewhere. Its time grows with the length
    of the texts alone, whatever the pattern is. Raises: ValueError for a pattern that RE2 does not know."""
    try:
        return pc.match_substring_regex(texts, pattern=pattern).to_numpy(zero_copy_only=False)
    except pa.ArrowInvalid as error:
        reason = str(error).partition(": ")[2] or str(error)
        raise ValueError(
            f"{pattern!r:.60} is no regular expression of RE2, which has no backreferences and no lookaround: {reason}"
        ) from None


def question_text(question: Mapping[str, object], name: str) -> str:
    """Returns a text of the page's question; "" for None. Raises: ValueError for another value or a long text."""
    value = question.get(name)
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > MOST_LETTERS:
        raise ValueError(f"{name} is a text of at most {MOST_LETTERS} letters, got {value!r:.40}")
    return value


def _ids(text: str) -> tuple[tuple[int, int], ...]:
    """Returns the ranges of a text such as "3, 7, 10-20". Raises: ValueError for another text."""
    found = []
    for part in filter(None, (one.strip() for one in text.split(","))):
        if not (ends := re.fullmatch(r"(\d{1,9})(?:\s*[-–]\s*(\d{1,9}))?", part, re.ASCII)):
            raise ValueError(f"requests are numbers and ranges, such as 3, 7, 10-20, got {text!r:.40}")
        found.append((int(ends[1]), int(ends[2] or ends[1])))
    return tuple(found)


def _ends(name: str, text: str) -> tuple[float | None, float | None]:
    """Returns (least, most) of a text "LEAST:MOST", where either can be missing. Raises: ValueError for others."""
    try:
        if not _RANGE.fullmatch(text):
            raise ValueError
        least, most = (float(end) if end else None for end in text.split(":"))
    except ValueError:
        raise ValueError(f"{name} is LEAST:MOST, such as 2:5, 2: or :5, got {text!r:.40}") from None
    return least, most
