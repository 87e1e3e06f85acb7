"""Hugging Face's own decoding of the same prompts, on a separately loaded copy with its default attention."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from cacheprobe.core.live import LiveModule
from cacheprobe.models.known import smollm2_directory


def generated(
    model: LiveModule, prompts: Sequence[Sequence[int]], max_new_tokens: int, **settings: Any
) -> list[list[int]]:
    """Greedy continuation of one left-padded batch by `generate`, each to `max_new_tokens`, on the model's device."""
    width = max(map(len, prompts))
    ids, mask = (
        torch.tensor([[0] * (width - len(prompt)) + part(prompt) for prompt in prompts], device=model.device)
        for part in (list, lambda prompt: [1] * len(prompt))
    )
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=max_new_tokens, pad_token_id=0, **settings
        )
    return out[:, width:].tolist()


class HuggingFace:
    """`generate` with nothing captured."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(smollm2_directory(), dtype=dtype).eval()
        self.model.generation_config.eos_token_id = None

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, **settings: Any) -> list[list[int]]:
        """Greedy continuation of one left-padded batch, each to `max_new_tokens`."""
        return generated(self.model, prompts, max_new_tokens, **settings)

    def in_turn(self, batches: Sequence[tuple[Sequence[Sequence[int]], int]], **settings: Any) -> Iterator[float]:
        """Generates one batch after another; yields the share of all prompts that is done.

        batches: each with its prompts and the number of new tokens.
        """
        done, total = 0, sum(len(prompts) for prompts, _ in batches)
        for prompts, new_tokens in batches:
            self.generate(prompts, new_tokens, **settings)
            done += len(prompts)
            yield done / total
