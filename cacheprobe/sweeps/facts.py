"""Reads a model's shape, tokenizer and hash without loading weights, so that impossible cells are refused early."""

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, cast

from cacheprobe.models.base import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    from cacheprobe.models.thinking.config import ThinkingConfig


@dataclass(frozen=True)
class ModelFacts:
    """Holds the shape, the tokenizer and the hash of a model, which are known before its weights are loaded."""

    name: str
    n_layers: int
    d_model: int
    n_heads: int
    n_ctx: int
    tokenizer: "PreTrainedTokenizerBase"
    source: str
    """Hash of the model's files, or the revision of a hub name."""
    thinking: "ThinkingConfig | None" = None
    """The ThinkingConfig of a Thinking States model; None for another model."""

    def count_tokens(self, text: str) -> int:
        """Returns the number of tokens of a prompt, including the tokens that the loaded model adds in front
        (special tokens, or the pads of a Thinking States model).

        Raises: ValueError for a word that is not in the vocabulary of a Thinking States model.
        Twin: CachedLM.encode, ==.
        """
        if self.thinking is None:
            return len(self.tokenizer(text).input_ids)
        from cacheprobe.tasks.words import encode_strictly

        try:
            count = len(encode_strictly(cast("PreTrainedTokenizerFast", self.tokenizer), text))
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from error
        return count + -count % self.thinking.chunk


@cache
def model_facts(name: str) -> ModelFacts:
    """Returns the ModelFacts of a model, by a name or directory for `load_model`. Raises: ModelError for a model that
    is unknown or not supported, or whose files cannot be read."""
    from cacheprobe.models.known import shipped_folder
    from cacheprobe.models.thinking.store import is_thinking_folder

    folder = shipped_folder("checkpoints", name) if "/" not in name else None
    if folder is None and is_thinking_folder(Path(name)):
        folder = Path(name)
    return _thinking_facts(name, folder) if folder else _plain_facts(name)


def _thinking_facts(name: str, folder: Path) -> ModelFacts:
    """Returns the ModelFacts of the Thinking States model in `folder`."""
    from cacheprobe.models.thinking.store import TOKENIZER, checked_config, read_config
    from cacheprobe.tasks.words import load_tokenizer

    config = checked_config(folder, read_config(folder))  # also checks the other files, before they are parsed
    shape = (config.n_layers, config.d_model, config.n_heads, config.n_ctx)
    return ModelFacts(name, *shape, load_tokenizer(folder / TOKENIZER), folder_digest(folder), config)


def _plain_facts(name: str) -> ModelFacts:
    """Returns the ModelFacts of a Hugging Face model. Raises: ModelError if it cannot be read or is not supported."""
    from transformers import CONFIG_NAME, AutoConfig, AutoTokenizer
    from transformers.utils.hub import cached_file

    from cacheprobe.models.hf.masks import context_length
    from cacheprobe.models.known import SMOLLM2, require_known
    from cacheprobe.models.plain.files import refuse_unknown_memory, require_no_own_code

    source, known = name, ""
    if name == SMOLLM2:
        from cacheprobe.models.smollm2 import smollm2_directory

        source = str(smollm2_directory(progress=False))
        known = Path(source).name  # the folder is named by the hash of the weights
    is_local = Path(source).is_dir()
    try:
        require_known(source)
        require_no_own_code(source, is_local)
        untrusted = {"local_files_only": is_local, "trust_remote_code": False}
        config = AutoConfig.from_pretrained(source, **untrusted)
        tokenizer = AutoTokenizer.from_pretrained(source, **untrusted)
        # the hub's cache names the folder of a revision by its hash
        in_cache = None if known or is_local else cached_file(source, CONFIG_NAME)
        digest = known or (folder_digest(Path(source)) if in_cache is None else Path(in_cache).parent.name)
    except ModelError:
        raise
    except (OSError, ValueError, KeyError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"model {name!r} is not to be had with its tokenizer: {first}") from error
    refuse_unknown_memory(config, (config.architectures or [config.model_type])[0])
    text = config.get_text_config()
    shape = (text.num_hidden_layers, text.hidden_size, text.num_attention_heads, context_length(text))
    return ModelFacts(name, *shape, tokenizer, digest)


@cache
def folder_digest(folder: Path) -> str:
    """Returns a hash of the names and bytes of all files in `folder`, at any depth: 20 hexadecimal digits.
    Later calls in the same process return the first result, even if the files have changed.

    Raises: ValueError if there is no such folder.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no directory {folder}; give an existing one")
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        with path.open("rb") as file:
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0")
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:20]
