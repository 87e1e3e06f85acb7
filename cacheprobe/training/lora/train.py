"""Trains a LoRA adapter on coin-flip questions."""

import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cacheprobe.core.live import LiveModule, LiveTokenizer
from cacheprobe.models.base import ModelError
from cacheprobe.tasks.coin_flip import CoinFlip, answer_token_ids
from cacheprobe.tasks.people import HELD_OUT_NAMES
from cacheprobe.training.loop import Loop, StepReport
from cacheprobe.training.lora.batches import LoraBatch, batches_of, encode, to_batch
from cacheprobe.training.lora.settings import LoraSettings


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
