"""By which way does the coin's state reach the answer: by the states that thoughts add, or by attention to the text?

    python -m cacheprobe_analyses.state_or_attention --json analyses/results/state-or-attention.json

A trained model, nothing trained again, answers with every added state set to zero; with the backbone's attention cut to
a token's own chunk, or to that and the one before, since operations cross boundaries; and with both. It reads on by its
own thoughts in each. Refused for a model that is at chance even untouched.
Source: the question is left open by Thinking States (arXiv 2602.08332).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import pandas as pd
import torch
from torch import Tensor

import cacheprobe as cp
from cacheprobe.core.terminal import Progress
from cacheprobe.models.thinking.model import ThinkingModel
from cacheprobe.tasks import Annotated, CoinFlip, annotate_all
from cacheprobe.tasks.base import Accuracy
from cacheprobe.training.thinking.recurrent import ThoughtIds, own_thoughts, write
from cacheprobe.views import ways_figure
from cacheprobe_analyses.command import command

WAYS: dict[str, tuple[bool, int | None]] = {
    "untouched": (True, None),
    "no states": (False, None),
    "attention to the own chunk and the one before": (True, 1),
    "attention to the own chunk": (True, 0),
    "attention to the own chunk and the one before, no states": (False, 1),
    "attention to the own chunk, no states": (False, 0),
}
"""Whether states are added, and how many chunks before its own a token attends to; None for all."""
UNTOUCHED = next(iter(WAYS))
CHANCE = 0.5


@dataclass(frozen=True)
class Config:
    """What is asked of which model."""

    model: str = "coinflip-thinking"
    operations: int = 10
    texts: int = 200
    seed: int = 3_000_000


@dataclass(frozen=True)
class Result:
    """How many answers, and texts with all their thoughts, are right on each way."""

    operations: int
    texts: int
    right: dict[str, int]
    thoughts_right: dict[str, int]
    unparsed: dict[str, int]

    def frame(self) -> pd.DataFrame:
        """A line for each way: way, share (of answers that are right), low and high (95 %), right, examples, chance."""
        lines = []
        for way, count in self.right.items():
            low, high = Accuracy(self.texts, count, 0, CHANCE).interval
            share = count / self.texts
            lines.append(
                dict(way=way, share=share, low=low, high=high, right=count, examples=self.texts, chance=CHANCE)
            )
        return pd.DataFrame(lines)

    def figure(self) -> Any:
        return ways_figure(self.frame())

    def table(self) -> str:
        lines = []
        for way, count in self.right.items():
            low, high = Accuracy(self.texts, count, 0, CHANCE).interval
            lines.append(
                f"{way}: {count} of {self.texts} answers right at {self.operations} operations (95 % {low:.3f} to "
                f"{high:.3f}), none in {self.unparsed[way]}; all thoughts right in {self.thoughts_right[way]}"
            )
        return "\n".join(lines)


def run(config: Config, progress: bool = False) -> Result:
    """Answer the same texts in every way. Raises: ValueError for a model that is at chance even untouched."""
    lm = cp.load_model(config.model)
    examples = CoinFlip(people=config.operations, distinct=False).examples(config.texts, config.seed)
    items = annotate_all(examples, lm.tokenizer, lm.config.chunk, lm.record["form"])
    answers = {item.answer_ids for item in items}
    right, thoughts_right, unparsed = {}, {}, {}
    with Progress(len(WAYS), "answering", "ways", enabled=progress) as bar:
        for way, (has_states, before) in WAYS.items():
            with nullcontext() if before is None else _reaching(lm.model, before):
                answered = _answered(lm.model, items, has_states)
            right[way] = sum(said == item.answer_ids for item, said, _ in answered)
            thoughts_right[way] = sum(thoughts == item.thoughts for item, _, thoughts in answered)
            unparsed[way] = sum(said not in answers for _, said, _ in answered)
            if way == UNTOUCHED and Accuracy(len(items), right[way], 0, CHANCE).interval[0] <= CHANCE:
                raise ValueError(
                    f"{config.model} answers {right[way]} of {len(items)} questions rightly untouched, no more than "
                    "chance: by which way its state goes cannot be asked; give a model that tracks the coin, or more "
                    "texts"
                )
            bar.advance(note=way)
    return Result(config.operations, config.texts, right, thoughts_right, unparsed)


def _answered(
    model: ThinkingModel, items: Sequence[Annotated], has_states: bool
) -> list[tuple[Annotated, tuple[int, ...], ThoughtIds]]:
    """Each text, what was written after it, and what was thought; those of one length side by side."""

    def zero(at: int, states: Tensor, texts: Sequence[int]) -> Tensor:
        return torch.zeros_like(states)

    edit = None if has_states else zero
    out = []
    for _, group in groupby(sorted(items, key=_length), key=_length):
        same = list(group)
        prompts = [item.token_ids for item in same]
        thoughts = own_thoughts(model, prompts, edit)
        out += zip(same, write(model, prompts, thoughts, len(same[0].answer_ids), edit), thoughts, strict=True)
    return out


def _length(item: Annotated) -> int:
    return len(item.token_ids)


@contextmanager
def _reaching(model: ThinkingModel, before: int) -> Iterator[None]:
    """The backbone's attention reaches a token's chunk and so many before; what is left of a pattern is made whole.

    Patterns are [b, h, t, s] over all s tokens so far, of which the last t ask: texts side by side are of one length.
    """

    def cut(pattern: Tensor, hook: object) -> Tensor:
        t, s = pattern.shape[-2:]
        chunks = torch.arange(s) // model.config.chunk
        kept = pattern * (chunks[s - t :, None] - chunks <= before)
        return kept / kept.sum(-1, keepdim=True)

    hooks: list[tuple[str, Callable]] = [(block.attn.hook_pattern.name, cut) for block in model.blocks]
    with model.hooks(fwd_hooks=hooks):
        yield


def main() -> None:
    command(__doc__, Config, run, model="a name or a directory", operations="of each text", texts="")


if __name__ == "__main__":
    main()
