"""Generates training texts for a tuned lens: prompts of the tasks, continued by the model itself."""

from functools import partial
from random import Random

import torch
from torch import Tensor

from cacheprobe.core.terminal import Progress
from cacheprobe.models.base import CachedLM
from cacheprobe.models.feeding import continue_texts
from cacheprobe.tasks import Boxes, CoinFlip, Permutations, Variables

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


def task_prompts(model: CachedLM, num_texts: int, seed: int, part: str) -> list[tuple[int, ...]]:
    """Returns a list of `num_texts` prompts as token ids, taken from the tasks in turn. A model without a tokenizer
    gets prompts of 1 to 8 random tokens."""
    rng = Random(f"tuned-lens prompts/{part}/{seed}")
    if model.tokenizer is None:
        return [tuple(rng.randrange(model.d_vocab) for _ in range(1 + i % 8)) for i in range(num_texts)]
    tasks = [CoinFlip(people=people) for people in (1, 2, 3, 4)] + [Variables(), Permutations(), Boxes()]
    prompts = []
    for i in range(num_texts):
        example = tasks[i % len(tasks)].examples(1, rng.getrandbits(31))[0]
        text = example.prompt_text(model.tokenizer)
        prompts.append(model.encode(text, add_special_tokens=not getattr(example, "chat", False)))
    return prompts


def _sample_next(model: CachedLM, generator: torch.Generator, texts: list[int], logits: Tensor) -> list[int]:
    """Returns a sampled next token for each text, at temperature 1; never an end token. texts: not used."""
    scores = logits.float().cpu().clone()
    scores[:, list(model.stop_token_ids)] = -torch.inf
    return torch.multinomial(scores.softmax(-1), 1, generator=generator)[:, 0].tolist()
