"""Trains a LoRA adapter on coin-flip questions."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cacheprobe.core.live import LiveModule, LiveTokenizer
from cacheprobe.models.base import ModelError
from cacheprobe.tasks.base import Example
from cacheprobe.tasks.coin_flip import STATES, CoinFlip, answer_token_ids
from cacheprobe.tasks.drawing import HELD_OUT_NAMES, TRAIN_NAMES
from cacheprobe.training.loop import Loop, StepReport
from cacheprobe.training.settings import LoraSettings


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


class LoraTrainer:
    """Trains a LoRA adapter in a float32 model. Holds the model, the optimizer and the training loop."""

    def __init__(
        self, model: LiveModule, tokenizer: LiveTokenizer, settings: LoraSettings, folder: Path | None = None
    ) -> None:
        """Freezes the weights of `model`, and adds an adapter in place.

        model: a transformers causal model in float32.  folder: for checkpoints, from which the training resumes.
        Raises: ModelError without a tokenizer or linear layers to adapt, or if first_layer is beyond the last layer.
        """
        from peft import LoraConfig, get_peft_model

        if tokenizer is None:
            raise ModelError(f"{settings.model} has no tokenizer, so there are no questions to train on")
        if settings.first_layer >= model.config.num_hidden_layers:
            raise ModelError(
                f"first_layer={settings.first_layer} leaves no block of {model.config.num_hidden_layers}; lower it"
            )
        self.settings, self.tokenizer = settings, tokenizer
        self.answer_ids = torch.tensor(answer_token_ids(tokenizer))
        self.config = LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,
            lora_dropout=0.0,
            target_modules=linear_names(model),
            layers_to_transform=list(range(settings.first_layer, model.config.num_hidden_layers)),
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers for a name that it will drop
            torch.manual_seed(settings.seed)
            self.peft_model = get_peft_model(model, self.config)
        self.model = model
        self.trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        self.optimizer = torch.optim.AdamW(
            self.trained.values(), lr=settings.learning_rate, betas=(0.9, 0.99), weight_decay=settings.weight_decay
        )
        self.loop = Loop(self.trained, self.optimizer, settings, folder)

    @property
    def num_trained(self) -> int:
        """Number of trained parameters of the adapter."""
        return sum(weight.numel() for weight in self.trained.values())

    def run(self, save_every: int = 20) -> Iterator[StepReport]:
        """Returns an iterator over the steps that are left: fetching an item runs one step and gives the step's
        StepReport.

        The values in a StepReport are those of `gradients_of`, measured before the step's update.
        """
        return self.loop.run(self.gradients_of, save_every=save_every)

    def gradients_of(self, step: int) -> dict[str, float]:
        """Computes the gradients of a step. Returns a dict: mean losses in nats, shares of right predictions, number of
        tokens.

        Keys: answer_loss_nats, answers_right, running_loss_nats, states_right (on the state after each person), tokens.
        """
        self.model.train()
        batches = batches_of(self.settings, step, self.tokenizer)
        num_questions, num_states = self.settings.batch, sum(len(batch.running) for batch in batches)
        sums = dict.fromkeys(("answer_loss_nats", "answers_right", "running_loss_nats", "states_right"), 0.0)
        for batch in batches:
            answer_logits, state_logits = self.logits(batch)
            answer_loss = cross_entropy(answer_logits, self.answer_ids[batch.answers], reduction="sum")
            running_loss = cross_entropy(state_logits, batch.running, reduction="sum")
            loss = answer_loss / num_questions + self.settings.running_weight * running_loss / num_states
            loss.backward()
            sums["answer_loss_nats"] += float(answer_loss.detach())
            sums["answers_right"] += int((answer_logits.argmax(-1) == self.answer_ids[batch.answers]).sum())
            sums["running_loss_nats"] += float(running_loss.detach())
            sums["states_right"] += int((state_logits.argmax(-1) == batch.running).sum())
        counts = {"answer": num_questions, "running": num_states, "answers": num_questions, "states": num_states}
        means = {name: value / counts[name.split("_")[0]] for name, value in sums.items()}
        return {**means, "tokens": sum(batch.num_tokens for batch in batches)}

    @torch.no_grad()
    def held_out_shares(self, questions: int = 16) -> dict[str, float]:
        """Returns a dictionary: number of people, as text -> share of questions whose likeliest next token is the first
        token of the right answer. The questions have held-out names.

        questions: number of questions for each number of people, the same at each call.
        """
        self.model.eval()
        shares = {}
        for people in range(1, self.settings.max_people + 1):
            examples = CoinFlip(people=people, names=HELD_OUT_NAMES).examples(questions, seed=self.settings.seed)
            batch = to_batch([encode(example, self.tokenizer) for example in examples])
            first = self.logits(batch)[0].argmax(-1)
            shares[str(people)] = float((first == self.answer_ids[batch.answers]).float().mean())
        return shares

    def logits(self, batch: LoraBatch) -> tuple[Tensor, Tensor]:
        """Returns two logit tensors: [b, v] after each question, and [n, 2] (heads, tails) after each person."""
        hidden = self.model.get_decoder()(input_ids=batch.token_ids, use_cache=False).last_hidden_state
        head = self.model.get_output_embeddings()
        answers = head(hidden[torch.arange(len(hidden)), batch.answer_slots])
        states = hidden[batch.running_batch_indices, batch.running_slots] @ head.weight[self.answer_ids].T
        return answers, states


def linear_names(model: LiveModule) -> list[str]:
    """Returns a sorted list of the different names of linear layers inside the model's blocks, such as q_proj.

    Raises: ModelError if no blocks or linear layers are found, or if the model caps its logits.
    """
    blocks = getattr(model.get_decoder(), "layers", None)
    names = (
        {path.rpartition(".")[2] for path, part in blocks.named_modules() if type(part) is nn.Linear} if blocks else ()
    )
    if not names or getattr(model.config, "final_logit_softcapping", None):
        raise ModelError(
            f"{type(model).__name__} cannot be trained here: it needs blocks in `layers` with linear layers inside, "
            "and logits straight from the unembedding; use a llama-like model"
        )
    return sorted(names)
