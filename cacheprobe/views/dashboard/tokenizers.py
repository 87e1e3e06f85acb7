"""Finds the texts of tokens that no table of a run names, with the model's tokenizer if its file is on this machine."""

from functools import lru_cache
from pathlib import Path

from cacheprobe.core.tokens import texts_of_backend
from cacheprobe.models.known import shipped_folder


def texts_of(model: str, token_ids: set[int]) -> dict[int, str]:
    """Returns a dict from token id to text, made by the tokenizer of a model; {} if the tokenizer's file is not on this
    machine. Ids outside the vocabulary are left out. Loads no weights, and no torch."""
    texts = _texts(model) if token_ids else []
    return {i: texts[i] for i in sorted(token_ids) if 0 <= i < len(texts)}


@lru_cache(maxsize=8)
def _texts(model: str) -> list[str]:
    """Returns the text of every token of a model's tokenizer; [] if its file is not on this machine."""
    path = _tokenizer_file(model)
    if path is None:
        return []
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    return texts_of_backend(tokenizer, max(tokenizer.get_vocab().values(), default=-1) + 1)


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
