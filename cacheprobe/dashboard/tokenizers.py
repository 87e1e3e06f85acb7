"""Finds the texts of tokens that no table of a run names, with the model's tokenizer if its file is on this machine."""

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from cacheprobe.models.known import shipped_folder

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def texts_of(model: str, token_ids: set[int]) -> dict[int, str]:
    """Returns a dict from token id to text, made by the tokenizer of a model; {} if the tokenizer's file is not on this
    machine. Ids outside the vocabulary are left out. Loads no weights, and no torch."""
    tokenizer = _tokenizer(model) if token_ids else None
    if tokenizer is None:
        return {}
    size = tokenizer.get_vocab_size()
    return {i: tokenizer.decode([i], skip_special_tokens=False) for i in sorted(token_ids) if 0 <= i < size}


@lru_cache(maxsize=8)
def _tokenizer(model: str) -> "Tokenizer | None":
    path = _tokenizer_file(model)
    if path is None:
        return None
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))


def _tokenizer_file(model: str) -> Path | None:
    """Returns the path of a model's tokenizer.json; None if the file is not on this machine."""
    if model == "smollm2-135m":
        from cacheprobe.models.smollm2 import smollm2_if_converted

        folder = smollm2_if_converted()
    else:
        folder = shipped_folder("checkpoints", model) or Path(model)
    path = folder / "tokenizer.json" if folder is not None else None
    if path is not None and path.is_file():
        return path
    if "/" not in model:
        return None
    from huggingface_hub import try_to_load_from_cache

    try:
        cached_path = try_to_load_from_cache(model, "tokenizer.json")
    except ValueError:
        return None
    return Path(cached_path) if isinstance(cached_path, str) else None
