"""Reads the sequences of Hugging Face's `generate`: where prompts end, and where a sequence ended."""

from collections.abc import Collection

import torch
from torch import Tensor


def prompt_mask(attention_mask: object, sequences: Tensor, length: int | None, refused: type[ValueError]) -> Tensor:
    """Returns the attention mask [b, prompt] of the prompts, as bools: False for padding.

    sequences: [b, t] token ids.  length: tokens of the longest prompt; None if the mask says it, as `generate` was
    given it.  Raises: `refused` for a mask that does not fit, or of prompts that are not padded on the left.
    """
    mask = torch.atleast_2d(torch.as_tensor(attention_mask).cpu())[:, :length].bool()
    width = mask.shape[1] if length is None else length
    if mask.shape != (len(sequences), width) or not 0 < width < sequences.shape[1]:
        raise refused(
            f"attention_mask {tuple(mask.shape)} does not fit sequences {tuple(sequences.shape)}; it needs one row for "
            "each sequence (repeat_interleave(num_return_sequences)) and the prompts' length"
        )
    if not bool(mask[:, -1].all()) or bool((mask.long().diff(dim=1) < 0).any()):
        raise refused("prompts are padded on the right or in between; generate needs padding_side='left'")
    return mask


def split_sequences(
    sequences: Tensor, mask: Tensor, stops: Collection[int]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Returns (prompt without padding, generated tokens up to the first stop token) of each sequence. mask: from
    `prompt_mask`."""
    found = []
    for ids, is_there in zip(sequences.tolist(), mask.tolist(), strict=True):
        generated = ids[len(is_there) :]
        end = next((index + 1 for index, token in enumerate(generated) if token in stops), len(generated))
        prompt = (token for token, wanted in zip(ids, is_there, strict=False) if wanted)
        found.append((tuple(prompt), tuple(generated[:end])))
    return found
