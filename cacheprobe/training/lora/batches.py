"""Makes the batches of coin-flip questions for a step of a LoRA training."""

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
class LoraBatch:
    """Holds encoded coin-flip questions as tensors, padded on the right."""

    token_ids: Tensor
    """[b, t] token ids; the pads repeat the last token of the question."""
    answer_slots: Tensor
    """[b] index of the last token of each question."""
    answers: Tensor
    """[b] 0 for heads, 1 for tails."""
    running_batch_indices: Tensor
    """[n] batch index of the question, for each of the n people in all questions."""
    running_slots: Tensor
    """[n] index of the token that completes the words on a person."""
    running: Tensor
    """[n] true state after a person: 0 for heads, 1 for tails."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the batch, including pads."""
        return self.token_ids.numel()


def examples_of(settings: LoraSettings, step: int) -> list[Example]:
    """Returns the list of training questions (Examples) of a step, each with 1 to `settings.people_at(step)` people."""
    rng = Random(f"lora/{settings.seed}/{step}")
    people = [1 + int(rng.random() * settings.people_at(step)) for _ in range(settings.batch)]
    seed = settings.seed * 1_000_003 + step
    drawn = []
    for count in sorted(set(people)):
        drawn += CoinFlip(people=count, names=TRAIN_NAMES).examples(people.count(count), seed)
    return drawn


def batches_of(settings: LoraSettings, step: int, tokenizer: LiveTokenizer) -> list[LoraBatch]:
    """Returns the training questions of a step as a list of LoraBatch (micro-batches), the shortest questions first."""
    examples = examples_of(settings, step)
    encoded = [encode(example, tokenizer) for example in examples]
    encoded.sort(key=lambda item: len(item[0]))
    width = settings.micro_batch
    return [to_batch(encoded[start : start + width]) for start in range(0, len(encoded), width)]


def encode(example: Example, tokenizer: LiveTokenizer) -> tuple[list[int], int, list[tuple[int, int]]]:
    """Returns (token ids, right answer, running states) of a question. Answer and states are 0 for heads, 1 for tails.

    running states: for each person, (index of the token that completes the words on the person, true state after it).
    Raises: ValueError for a tokenizer without character offsets.
    """
    ids, slots = example.completing_tokens(tokenizer, add_special_tokens=True)
    running = [(slot, STATES.index(state)) for slot, state in zip(slots, example.states[1:], strict=True)]
    return ids, STATES.index(example.answer.strip()), running


def to_batch(encoded: list[tuple[list[int], int, list[tuple[int, int]]]]) -> LoraBatch:
    """Returns one LoraBatch from the results of `encode` for several questions, padded to the longest."""
    longest = max(len(ids) for ids, _, _ in encoded)
    running = [(index, slot, state) for index, (_, _, states) in enumerate(encoded) for slot, state in states]
    batch_indices, slots, states = (torch.tensor(column) for column in zip(*running, strict=True))
    return LoraBatch(
        token_ids=torch.tensor([ids + [ids[-1]] * (longest - len(ids)) for ids, _, _ in encoded]),
        answer_slots=torch.tensor([len(ids) - 1 for ids, _, _ in encoded]),
        answers=torch.tensor([answer for _, answer, _ in encoded]),
        running_batch_indices=batch_indices,
        running_slots=slots,
        running=states,
    )
