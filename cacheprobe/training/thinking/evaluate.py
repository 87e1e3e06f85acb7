"""Measures the accuracy of a Thinking States model, or of another arm (trained variant), with the model's own thoughts
and tokens.

If one pass predicts all gold thoughts and tokens of a text, that pass gives the result. Other texts are run in full.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from cacheprobe.models.thinking.model import ThinkingModel
from cacheprobe.tasks.thoughts import Annotated
from cacheprobe.training.thinking.losses import IGNORED, collate, tokens_to_write
from cacheprobe.training.thinking.recurrent import best, own_thoughts, write

READ_AT_ONCE = 4_000
"""Largest number of tokens in a pass over whole texts, unless one text has more."""
WRITTEN_AT_ONCE = 60_000
"""Largest number of prompt and answer tokens of texts that are generated side by side, unless one text has more."""


@dataclass(frozen=True)
class Judgements:
    """Holds the results of an evaluation: three tuples with one True or False for each text. They say whether the
    answer is right, whether every thought is right, and whether the text can be read as an answer (`is_parsable`)."""

    is_right: tuple[bool, ...]
    """Whether the written answer, up to its end token, is the gold answer; a text without an answer counts as wrong."""
    is_thought_right: tuple[bool, ...]
    """Whether every thought is the gold one; without meaning for an arm without thoughts."""
    is_parsable: tuple[bool, ...]
    """Whether the written text is the right answer to at least one evaluated text, up to its end token. A chain of
    thought only has to end in such an answer."""

    @property
    def accuracy(self) -> float:
        """Share of texts with the right answer, from 0 to 1."""
        return sum(self.is_right) / len(self.is_right)

    def counts(self) -> dict[str, int]:
        """Returns a dictionary with numbers of texts: texts (all), right (answer), thoughts_right (every thought),
        unparsed (those that are not `is_parsable`)."""
        return {
            "texts": len(self.is_right),
            "right": sum(self.is_right),
            "thoughts_right": sum(self.is_thought_right),
            "unparsed": self.is_parsable.count(False),
        }


@torch.inference_mode()
def evaluate(
    model: ThinkingModel,
    items: Sequence[Annotated],
    arm: str,
    report: Callable[[int], None] = lambda done: None,
) -> Judgements:
    """Runs texts with the model's own thoughts and tokens. Returns Judgements: for each text, three True or False
    values from the comparison with the gold thoughts and answer.

    arm: one of ARMS, the trained variants.  report: is called with the number of texts done.
    Raises: ValueError for no texts, or for texts annotated in chunks of another size than the model's.
    Twin: tests.training.test_thinking_training.judged_slowly, ==.
    """
    if not items:
        raise ValueError("there are no texts to evaluate; give at least one")
    chunk = model.config.chunk
    if model.config.thinks and (other := [item.chunk for item in items if item.chunk != chunk]):
        raise ValueError(
            f"{len(other)} of {len(items)} texts are annotated in chunks of other than the model's {chunk} tokens, the "
            f"first in chunks of {other[0]}; annotate them with chunk={chunk}"
        )
    answers = {item.answer_ids for item in items}
    out: list[tuple[bool, bool, bool] | None] = [None] * len(items)  # (answer right, thoughts right, parsable)
    order = sorted(range(len(items)), key=lambda i: len(items[i].token_ids))
    for group in _groups(order, items, READ_AT_ONCE):
        for i, gold in zip(group, follows_gold(model, [items[i] for i in group], arm), strict=True):
            out[i] = (True, True, True) if gold else None
        report(sum(judgement is not None for judgement in out))
    remaining = [i for i in order if out[i] is None]
    for group in _groups(remaining, items, WRITTEN_AT_ONCE):
        for i, judgement in zip(group, _judge_own_runs(model, [items[i] for i in group], arm, answers), strict=True):
            out[i] = judgement
        report(sum(judgement is not None for judgement in out))
    right, thought, parsable = zip(*[judgement for judgement in out if judgement is not None], strict=True)
    return Judgements(right, thought, parsable)


@torch.inference_mode()
def follows_gold(model: ThinkingModel, items: Sequence[Annotated], arm: str) -> list[bool]:
    """Returns a list: for each text, True if the model, fed the gold text, predicts all tokens to write and, in an arm
    with thoughts, all gold thoughts."""
    batch = collate(items, arm, model.config.pad_id)
    logits, thought_logits = model(batch.token_ids, batch.thoughts)
    wanted = batch.labels != IGNORED
    predicted = torch.full_like(batch.labels, IGNORED)
    predicted[wanted] = best(logits[wanted])
    right = (predicted == batch.labels).all(1)
    if batch.thoughts is not None:
        assert thought_logits is not None
        is_real = batch.thoughts != model.config.pad_id
        thought = torch.full_like(batch.thoughts, model.config.pad_id)
        thought[is_real] = best(thought_logits[is_real])
        right &= (thought == batch.thoughts).flatten(1).all(1)
    return right.tolist()


def _judge_own_runs(
    model: ThinkingModel, items: Sequence[Annotated], arm: str, answers: set[tuple[int, ...]]
) -> list[tuple[bool, bool, bool]]:
    """Generates thoughts and a text for each item; returns a list of (answer right, all thoughts right, text
    parsable)."""
    prompts = [item.token_ids for item in items]
    longest = max(len(tokens_to_write(item, arm)) for item in items) + 8  # also for a text longer than the gold one
    thoughts = own_thoughts(model, prompts) if model.config.thinks else [()] * len(items)
    written = write(model, prompts, thoughts, longest)
    judgements = []
    for item, own_thought, text in zip(items, thoughts, written, strict=True):
        answer = text[-len(item.answer_ids) :] if text[-1:] == (model.config.eos_id,) else ()
        is_whole = arm == "chain_of_thought" or text == answer
        is_parsable = answer in answers and is_whole
        judgements.append((is_parsable and answer == item.answer_ids, own_thought == item.thoughts, is_parsable))
    return judgements


def _groups(order: Sequence[int], items: Sequence[Annotated], tokens: int) -> list[list[int]]:
    """Returns text indices in lists of at most `tokens` prompt and answer tokens, pads included; a longer text is a
    list of its own. The argument `order` has the shortest prompt first."""
    groups: list[list[int]] = []
    for i in order:
        size = len(items[i].token_ids) + len(items[i].answer_ids)
        if groups and (len(groups[-1]) + 1) * size <= tokens:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups
