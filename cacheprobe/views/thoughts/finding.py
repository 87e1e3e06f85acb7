"""Writes the sentence above the picture of thoughts."""

from collections.abc import Sequence

import pandas as pd

from cacheprobe.views.text import shorten, visible
from cacheprobe.views.thoughts.columns import Story, changes_of_mind, words_of


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
            sentence = f"The thought changes its mind {_times(count)} {while_reading}: {_path(path)}"
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


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


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
    return shorten(visible(text).replace("␣", " "), 24)
