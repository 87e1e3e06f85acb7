"""Generates with transformers, keeps what its hooks say about each block, and exchanges parts of what it returned."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.by_hand import first_of

ASKED = dict(return_dict_in_generate=True, output_hidden_states=True, output_logits=True, pad_token_id=0)


class Generated:
    """What transformers' generate returned for some prompts, and what left each block, by hooks."""

    def __init__(self, hf: Any, prompts: Sequence[Sequence[int]], **settings: Any) -> None:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + [*prompt] for prompt in prompts])
        self.mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        self.settings = {**ASKED, "max_new_tokens": 6, "do_sample": False, **settings}
        self.blocks = blocks_of(hf)
        left: list[list[Tensor]] = [[] for _ in self.blocks]
        hooks = [
            block.register_forward_hook(lambda _, __, output, kept=kept: kept.append(first_of(output).clone()))
            for block, kept in zip(self.blocks, left, strict=True)
        ]
        self.output = hf.generate(ids, attention_mask=self.mask, **self.settings)
        for hook in hooks:
            hook.remove()
        self.mask = self.mask.repeat_interleave(len(self.output.sequences) // len(ids), 0)
        self.left = [torch.cat(passes, 1) for passes in left]

    def states(self, layer: int, sequence: int) -> Tensor:
        """What left a block at each token of a sequence, [t, m]."""
        return self.left[layer][sequence, len(self.mask[0]) - int(self.mask[sequence].sum()) :]

    def copied(self) -> SimpleNamespace:
        """The output with tensors of its own, which may be changed."""
        return SimpleNamespace(
            sequences=self.output.sequences.clone(),
            hidden_states=[[state.clone() for state in of_pass] for of_pass in self.output.hidden_states],
            logits=[logits.clone() for logits in self.output.logits or ()] or None,
        )


def blocks_of(hf: Any) -> nn.ModuleList:
    """The blocks that read text: the first list of modules, but for those of images."""
    lists = [(path, module) for path, module in hf.named_modules() if isinstance(module, nn.ModuleList)]
    return next(module for path, module in lists if "vision" not in path)


def exchange(one: Tensor, other: Tensor) -> None:
    """Exchanges the contents of two tensors of one shape, such as two parts of an output."""
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)


def written(output: Any, mask: Tensor, path: Path) -> Path:
    """The file that docs/import.md says how to write."""
    tensors = {"sequences": output.sequences, "attention_mask": mask}
    for number, of_pass in enumerate(output.hidden_states):
        tensors |= {f"hidden_states.{number}.{k}": state.clone() for k, state in enumerate(of_pass)}
    for number, logits in enumerate(output.logits or ()):
        tensors[f"logits.{number}"] = logits.clone()
    save_file(tensors, path)
    return path
