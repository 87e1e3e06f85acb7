"""Trains a tuned lens: translators (affine maps) that minimise the KL divergence from the model's own output, on texts
that the model writes."""

import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch
from einops import rearrange, reduce
from jaxtyping import Float
from torch import Tensor, nn

from cacheprobe.core.terminal import Progress
from cacheprobe.core.values import Json
from cacheprobe.lenses.base import Lens, LensError
from cacheprobe.lenses.logit import LogitLens
from cacheprobe.lenses.tuned import TunedLens
from cacheprobe.models.base import CachedLM
from cacheprobe.models.feeding import continue_texts, feed
from cacheprobe.models.paths import choose_path
from cacheprobe.models.prompts import Chat
from cacheprobe.tasks import Boxes, CoinFlip, Permutations, Variables
from cacheprobe.training.loop import Loop, StepReport, TrainingProgress
from cacheprobe.training.settings import TunedLensSettings

AT_ONCE = 64
"""Number of texts that are generated in one batch."""


def write_texts(
    model: CachedLM, num_texts: int, length: int, seed: int, part: str, *, progress: bool = False
) -> Tensor:
    """Returns token ids [num_texts, length]: each text is a task's prompt, continued by the model at temperature 1.

    part: "train" or "held-out", which have independent random draws. A prompt takes at most half of the text. End
    tokens are never sampled, so every text has its full length. A model without a tokenizer gets random tokens as
    prompts.
    Raises: ValueError if length exceeds the model's context.
    """
    if length > model.n_ctx:
        raise ValueError(f"texts of {length} tokens exceed the context of {model.name}, {model.n_ctx}; lower length")
    prompts = [prompt[: max(length // 2, 1)] for prompt in task_prompts(model, num_texts, seed, part)]
    generator = torch.Generator().manual_seed(Random(f"tuned-lens/{part}/{seed}").getrandbits(62))
    parts = []
    with Progress(num_texts, f"writing {part} text", "texts", enabled=progress) as bar:
        for start in range(0, num_texts, AT_ONCE):
            texts = continue_texts(
                model, prompts[start : start + AT_ONCE], length, partial(_sample_next, model, generator)
            )
            parts.append(torch.tensor(texts))
            bar.advance(len(parts[-1]))
    return torch.cat(parts)


def task_prompts(
    model: CachedLM, num_texts: int, seed: int, part: str, *, in_chat: bool = False
) -> list[tuple[int, ...]]:
    """Returns a list of `num_texts` prompts as token ids, taken from the tasks in turn. A model without a tokenizer
    gets prompts of 1 to 8 random tokens. in_chat: put each into the chat template of the tokenizer, if it has one."""
    rng = Random(f"tuned-lens prompts/{part}/{seed}")
    if model.tokenizer is None:
        return [tuple(rng.randrange(model.d_vocab) for _ in range(1 + i % 8)) for i in range(num_texts)]
    tasks = [CoinFlip(people=people) for people in (1, 2, 3, 4)] + [Variables(), Permutations(), Boxes()]
    prompts = []
    for i in range(num_texts):
        example = tasks[i % len(tasks)].examples(1, rng.getrandbits(31))[0]
        text, is_chat = example.prompt_text(model.tokenizer), getattr(example, "chat", False)
        if in_chat and not is_chat and getattr(model.tokenizer, "chat_template", None):
            text, is_chat = Chat([{"role": "user", "content": text}]).prompt_text(model.tokenizer), True
        prompts.append(model.encode(text, add_special_tokens=not is_chat))
    return prompts


def _sample_next(model: CachedLM, generator: torch.Generator, texts: list[int], logits: Tensor) -> list[int]:
    """Returns a sampled next token for each text, at temperature 1; never an end token. texts: not used."""
    scores = logits.float().cpu().clone()
    scores[:, list(model.stop_token_ids)] = -torch.inf
    return torch.multinomial(scores.softmax(-1), 1, generator=generator)[:, 0].tolist()


VECTORS_AT_ONCE = 256
"""Number of vectors in one product with the unembedding."""


class TextStates(NamedTuple):
    """Holds a model's residual stream and output log-probabilities for texts [b, t]. The axis n = b x t counts the
    tokens of all texts, one text after another."""

    layers: Float[Tensor, "l n m"]
    """Residual stream after every block but the last."""
    output_logprobs_nats: Float[Tensor, "n v"]
    """Log-probabilities of the model itself."""


def states_of(model: CachedLM, texts: Tensor) -> TextStates:
    """Runs the model on texts [b, t] in one forward pass; returns the TextStates of their n = b x t tokens."""
    sites = [("S", layer) for layer in range(model.n_layers - 1)]
    fed = feed(model, texts, sites)
    layers = torch.stack([fed.states[site].flatten(0, 1) for site in sites])
    return TextStates(layers, fed.out.flatten(0, 1).float().log_softmax(-1))


class TunedLensTrainer:
    """Trains the translators (affine maps) of all layers but the last together, starting from the identity.

    Source: Belrose et al. 2023 (arXiv 2303.08112), section 3; optimizer as in PyPI's tuned-lens.
    Twin: tests.twins.lenses_slowly.tuned_lens_gradients_slowly, close(1e-4): one layer, one token at a time.
    """

    def __init__(self, model: CachedLM, settings: TunedLensSettings) -> None:
        if model.dtype != torch.float32:
            raise LensError(f"a tuned lens is trained in float32, {model.name} is in {model.dtype}; load it with it")
        self.model, self.settings = model, settings
        start = TunedLens.fresh(model)
        assert isinstance(start, TunedLens)
        self.weights, self.biases = nn.Parameter(start.weights), nn.Parameter(start.biases)
        self.unembedding = start.unembedding
        optimizer = torch.optim.SGD(
            [self.weights, self.biases],
            lr=settings.learning_rate_at(0),
            momentum=settings.momentum,
            nesterov=settings.momentum > 0,
            weight_decay=settings.weight_decay,
        )
        self.loop = Loop({"weights": self.weights, "biases": self.biases}, optimizer, settings)

    def run(self, texts: Tensor) -> Iterator[StepReport]:
        """Returns an iterator over the steps that are left, on texts [n, t]: fetching an item runs one step and gives
        the step's StepReport.

        Each step reads the next `settings.texts` texts; after the last whole batch, the first texts again. The loss in
        a StepReport, kl_nats, is the mean over layers.
        Raises: ValueError, at the call, for fewer texts than a step reads.
        """
        settings = self.settings
        if len(texts) < settings.texts:
            raise ValueError(f"a step reads {settings.texts} texts, there are {len(texts)}; write more")

        def gradients_of(step: int) -> dict[str, float]:
            """Computes the gradients of step `step` on the next texts; returns the mean KL divergence as `kl_nats`."""
            start = step * settings.texts % (len(texts) - len(texts) % settings.texts)
            kl_nats = self.backward(states_of(self.model, texts[start : start + settings.texts]))
            return {"kl_nats": float(kl_nats.mean())}

        return self.loop.run(gradients_of)

    def backward(self, states: TextStates) -> Tensor:
        """Computes the gradients of the loss for `states`, a TextStates. Returns [l]: for each layer but the last, the
        mean KL divergence over tokens, in nats. The loss is the sum of these means."""
        layers, tokens, _ = states.layers.shape
        moved = states.layers + torch.baddbmm(self.biases[:, None], states.layers, self.weights)
        flat = rearrange(moved.detach(), "l t m -> (l t) m")
        gradient, kl = torch.empty_like(flat), torch.empty(len(flat), device=flat.device)
        for start in range(0, len(flat), VECTORS_AT_ONCE):
            part = flat[start : start + VECTORS_AT_ONCE].clone().requires_grad_()
            token = torch.arange(start, start + len(part), device=flat.device) % tokens
            part_kl = _kl_nats(self.model.read_out_with_gradients(part), states.output_logprobs_nats[token])
            (gradient[start : start + len(part)],) = torch.autograd.grad(part_kl.sum() / tokens, [part])
            kl[start : start + len(part)] = part_kl.detach()
        moved.backward(gradient.view_as(moved))
        return reduce(kl, "(l t) -> l", "mean", l=layers)

    def lens(self, about: dict[str, Json] | None = None) -> TunedLens:
        """Returns a TunedLens with a copy of the current translators. about: metadata to store with the lens."""
        return TunedLens(self.weights.detach().clone(), self.biases.detach().clone(), self.unembedding, about or {})


@torch.inference_mode()
def divergences(model: CachedLM, lens: Lens, texts: Tensor) -> Float[Tensor, "l"]:
    """Returns [l]: for each layer but the last, the mean KL divergence of the lens from the model's own output, in
    nats.

    texts: token ids [n, t]. The mean is taken over all tokens.
    """
    total = torch.zeros(model.n_layers - 1, dtype=torch.float64)
    for text in texts:
        states = states_of(model, text[None])
        layer = torch.arange(len(total), device=model.device).repeat_interleave(len(text))
        token = torch.arange(len(text), device=model.device).repeat(len(total))
        vectors = rearrange(states.layers, "l t m -> (l t) m").split(VECTORS_AT_ONCE)
        parts = zip(vectors, layer.split(VECTORS_AT_ONCE), token.split(VECTORS_AT_ONCE), strict=True)
        outputs = states.output_logprobs_nats
        kl = torch.cat([_kl_nats(lens.logits(model, part, layers), outputs[tokens]) for part, layers, tokens in parts])
        total += reduce(kl.double(), "(l t) -> l", "sum", l=len(total)).cpu()
    return total / texts.numel()


def _kl_nats(logits: Float[Tensor, "n v"], output: Float[Tensor, "n v"]) -> Float[Tensor, "n"]:
    """Returns [n]: KL(output || softmax(logits)) in nats. output: log-probabilities."""
    terms = output.exp() * (output - logits.float().log_softmax(-1))
    return terms.masked_fill(output == -torch.inf, 0.0).sum(-1)


def train_tuned_lens(
    model: CachedLM, settings: TunedLensSettings, out: Path | None = None, *, progress: bool = True
) -> TunedLens:
    """Trains a tuned lens for `model`, compares it with the logit lens on held-out text, and returns the tuned lens.

    out: folder in which the lens is saved; None saves no file.
    lens.about: settings, model, weights_note, tokens (used in training), held_out_tokens, kl_nats_logit and
    kl_nats_tuned (mean on the held-out text, for each layer but the last), seconds, cpu_seconds, threads. Two trainings
    with equal settings and threads on one machine give the same bits. An interrupted training leaves no files.
    Raises: LensError for a model that is not in float32, ValueError for a text length beyond the model's context.
    """
    began, began_cpu = time.monotonic(), time.process_time()
    trainer = TunedLensTrainer(model, settings)
    reader, _ = choose_path(model, "auto")
    trainer.model = reader
    texts = write_texts(
        reader, settings.steps * settings.texts, settings.length, settings.seed, "train", progress=progress
    )
    with TrainingProgress(settings.steps, 0, progress) as show:
        for at in trainer.run(texts):
            show(at.step, f"KL {at.losses['kl_nats']:.3f} nats, mean over layers")
    held_out = write_texts(reader, settings.held_out, settings.length, settings.seed, "held-out", progress=progress)
    lens = trainer.lens()
    about: dict[str, Json] = {
        "settings": settings.as_dict(),
        "model": model.name,
        "weights_note": model.weights_note,
        "tokens": texts.numel(),
        "held_out_tokens": held_out.numel(),
        "kl_nats_logit": [round(kl, 4) for kl in divergences(reader, LogitLens(), held_out).tolist()],
        "kl_nats_tuned": [round(kl, 4) for kl in divergences(reader, lens, held_out).tolist()],
        "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(time.process_time() - began_cpu, 1),
        "threads": torch.get_num_threads(),
    }
    lens = trainer.lens(about)
    if out is not None:
        lens.save(out)
    return lens


def comparison(about: Mapping[str, Json]) -> str:
    """Returns a text table of the KL divergences of logit lens and tuned lens on held-out text: one line for each layer
    but the last.

    about: metadata of a trained lens (`TunedLens.about`), with kl_nats_logit and kl_nats_tuned.
    """
    lines = ["layer  logit lens  tuned lens  (KL to the model's own output, nats, held-out text)"]
    logit_nats, tuned_nats = about["kl_nats_logit"], about["kl_nats_tuned"]
    assert isinstance(logit_nats, list) and isinstance(tuned_nats, list)
    pairs = zip(logit_nats, tuned_nats, strict=True)
    return "\n".join(lines + [f"{layer:5}  {logit:10.3f}  {tuned:10.3f}" for layer, (logit, tuned) in enumerate(pairs)])
