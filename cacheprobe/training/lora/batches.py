"""Coin-flip questions as tensors: a function of the settings and the step only, so resuming needs no stored data."""

from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from cacheprobe.core.live import LiveTokenizer
from cacheprobe.tasks.base import Example
from cacheprobe.tasks.coin_flip import STATES, CoinFlip
from cacheprobe.tasks.people import TRAIN_NAMES
from cacheprobe.training.lora.settings import LoraSettings


@dataclass(frozen=True)
class Batch:
    """Questions of similar length. Pads stand on the right, so no token of a causal model attends to them."""

    token_ids: Tensor
    """[b, t]"""
    answer_slots: Tensor
    """[b] index of the last token of each question."""
    answers: Tensor
    """[b] 0 for heads, 1 for tails."""
    running_rows: Tensor
    """[n] batch index of each person's words; `running_slots` [n] is the token that completes these words."""
    running_slots: Tensor
    running: Tensor
    """[n] true state after that person: 0 for heads, 1 for tails."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens, including pads."""
        return self.token_ids.numel()


def examples_of(settings: LoraSettings, step: int) -> list[Example]:
    """Returns the questions of a step: 1 to `people_at(step)` people with equal probability, and every pattern of flips
    too."""
    rng = Random(f"lora/{settings.seed}/{step}")
    people = [1 + int(rng.random() * settings.people_at(step)) for _ in range(settings.batch)]
    seed = settings.seed * 1_000_003 + step
    drawn = []
    for count in sorted(set(people)):
        drawn += CoinFlip(people=count, names=TRAIN_NAMES).examples(people.count(count), seed)
    return drawn


def batches_of(settings: LoraSettings, step: int, tokenizer: LiveTokenizer) -> list[Batch]:
    """Returns the questions of a step in micro-batches, shortest first."""
    examples = examples_of(settings, step)
    encoded = [encode(example, tokenizer) for example in examples]
    encoded.sort(key=lambda item: len(item[0]))
    width = settings.micro_batch
    return [to_batch(encoded[start : start + width]) for start in range(0, len(encoded), width)]


def encode(example: Example, tokenizer: LiveTokenizer) -> tuple[list[int], int, list[tuple[int, int]]]:
    """Returns a question's token ids, its answer (0 or 1), and (slot, state) of the token that completes each person's
    words.

    Raises: ValueError for a tokenizer without character offsets.
    """
    ids, slots = example.completing_tokens(tokenizer, add_special_tokens=True)
    running = [(slot, STATES.index(state)) for slot, state in zip(slots, example.states[1:], strict=True)]
    return ids, STATES.index(example.answer.strip()), running


def to_batch(encoded: list[tuple[list[int], int, list[tuple[int, int]]]]) -> Batch:
    """Returns the results of `encode` for several questions as tensors."""
    longest = max(len(ids) for ids, _, _ in encoded)
    running = [(row, slot, state) for row, (_, _, listed) in enumerate(encoded) for slot, state in listed]
    rows, slots, states = (torch.tensor(column) for column in zip(*running, strict=True))
    return Batch(
        token_ids=torch.tensor([ids + [ids[-1]] * (longest - len(ids)) for ids, _, _ in encoded]),
        answer_slots=torch.tensor([len(ids) - 1 for ids, _, _ in encoded]),
        answers=torch.tensor([answer for _, answer, _ in encoded]),
        running_rows=rows,
        running_slots=slots,
        running=states,
    )
