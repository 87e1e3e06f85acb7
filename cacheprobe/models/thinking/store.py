"""Saves and loads Thinking States models: weights, config, tokenizer and training record, each checked by hash.

folder/
  model.safetensors   the weights
  tokenizer.json      the vocabulary
  config.json         the ThinkingConfig, the hashes of the config and of the two other files, and the training record;
  written last
"""

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, TypeGuard

from cacheprobe.core.files import sha256_of_file, write_json
from cacheprobe.models.base import ModelError
from cacheprobe.models.thinking.config import ThinkingConfig, TrainingRecord

if TYPE_CHECKING:  # they take seconds to load
    import torch
    from transformers import PreTrainedTokenizerFast

    from cacheprobe.models.thinking.lm import ThinkingLM
    from cacheprobe.models.thinking.model import ThinkingModel

CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
CONFIG_HASH = "config_sha256"
"""Hash of the field "config" alone. The hashes under "sha256" are those of files."""
KIND = "cacheprobe thinking states"
KEEP = (
    "keep its weights with safetensors.torch.save_file(dict(model.named_parameters()), path), and put them into "
    "another of the same backbone and config with model.load_state_dict(load_file(path), strict=False)"
)


class StoredModel(TypedDict):
    """Holds the content of a model folder's config.json: kind, ThinkingConfig, hashes, training record."""

    kind: str
    config: dict[str, object]
    config_sha256: str
    sha256: dict[str, str]
    """SHA-256 of each other file of the folder."""
    record: TrainingRecord
    """Training record: command, number of parameters, CPU seconds and more."""


def save_thinking(
    folder: Path, model: "ThinkingModel", tokenizer: "PreTrainedTokenizerFast", record: Mapping[str, object]
) -> Path:
    """Writes a Thinking States model into `folder` and returns the folder. record: task, preset, training variant,
    seed, command and training results.

    Raises: ModelError for a ThinkingPretrained, which cannot be rebuilt from its config.
    """
    from safetensors.torch import save_file

    from cacheprobe.models.thinking.pretrained import ThinkingPretrained
    from cacheprobe.tasks.words import save_tokenizer

    if isinstance(model, ThinkingPretrained):
        raise ModelError(f"{type(model).__name__} is of a {model.backbone_name}, which a config does not make; {KEEP}")
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: w.detach().contiguous() for name, w in model.named_parameters()}, folder / WEIGHTS)
    save_tokenizer(tokenizer, folder / TOKENIZER)
    config = model.config.to_json()
    content = {
        "kind": KIND,
        "config": config,
        CONFIG_HASH: config_hash(config),
        "sha256": {name: sha256_of_file(folder / name) for name in (WEIGHTS, TOKENIZER)},
        "record": record,
    }
    write_json(folder / CONFIG, content)
    return folder


def load_thinking(
    folder: Path, name: str | None = None, dtype: "torch.dtype | None" = None, device: "torch.device | str" = "cpu"
) -> "ThinkingLM":
    """Returns a ThinkingLM loaded from a folder that `save_thinking` wrote.

    Raises: ModelError if a file is missing, does not match its hash in the config, or does not fit the config.
    """
    from safetensors.torch import load_file

    from cacheprobe.models.thinking.lm import ThinkingLM
    from cacheprobe.models.thinking.model import ThinkingModel
    from cacheprobe.tasks.words import load_tokenizer

    stored = read_config(folder)
    config = checked_config(folder, stored)
    tokenizer = load_tokenizer(folder / TOKENIZER)
    if len(tokenizer) != config.d_vocab:
        raise ModelError(f"{folder}: a vocabulary of {len(tokenizer)} words for a model of {config.d_vocab}")
    model, weights = ThinkingModel(config), load_file(folder / WEIGHTS)
    shapes = {name: tuple(w.shape) for name, w in model.named_parameters()}
    if shapes != {name: tuple(w.shape) for name, w in weights.items()}:
        odd = sorted(set(shapes.items()) ^ {(n, tuple(w.shape)) for n, w in weights.items()})[0]
        raise ModelError(f"{folder}: the weights do not fit the config, for instance {odd[0]} of shape {odd[1]}")
    model.load_state_dict(weights, strict=False)
    record = stored["record"]
    note = f"trained from scratch here: {record.get('command', 'no command recorded')}"
    lm = ThinkingLM((model if dtype is None else model.to(dtype)).to(device), tokenizer, name or folder.name, note)
    lm.record = record
    return lm


def read_config(folder: Path) -> "StoredModel":
    """Returns the content of a model folder's config.json as a StoredModel (a dictionary).

    Raises: ModelError for an unreadable file, another kind of config, a missing field, or an edited config.
    """
    path = folder / CONFIG
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path} cannot be read ({error}); give the folder of a saved Thinking States model"
        ) from error
    if not is_thinking_config(stored):
        raise ModelError(f"{path} is no config of a Thinking States model")
    for name in ("config", "sha256", "record"):
        if not isinstance(stored.get(name), dict):
            raise ModelError(f"{path} has no field {name!r}; {_remedy(stored)}")
    if lacking := [file for file in (WEIGHTS, TOKENIZER) if file not in stored["sha256"]]:
        raise ModelError(f"{path} has no hash of {lacking[0]} in its field 'sha256'; {_remedy(stored)}")
    if CONFIG_HASH not in stored:
        raise ModelError(f"{path} has no field {CONFIG_HASH!r}, so nobody can say what was trained; {_remedy(stored)}")
    actual = config_hash(stored["config"])
    if (recorded := stored["config_sha256"]) != actual:
        raise ModelError(
            f"the field 'config' of {path} has the hash {actual[:12]}, and {CONFIG_HASH} says {recorded!s:.12}: it was "
            f"edited after the training; {_remedy(stored)}"
        )
    return stored


def checked_config(folder: Path, stored: "StoredModel") -> ThinkingConfig:
    """Returns the ThinkingConfig in `stored`, the result of `read_config`, after checking the hashes of the files of
    `folder` that `stored` lists.

    Raises: ModelError for an invalid config, and for a file that is missing or does not match its hash.
    """
    for file, recorded in stored["sha256"].items():
        path = folder / file
        if not path.exists():
            raise ModelError(f"{folder} has no {file}; {_remedy(stored)}")
        if (actual := sha256_of_file(path)) != recorded:
            raise ModelError(
                f"{path} has the hash {actual[:12]}, and {CONFIG} speaks of {recorded!s:.12}; {_remedy(stored)}"
            )
    try:
        return ThinkingConfig.from_json(stored["config"])
    except ModelError as error:
        raise ModelError(f"{folder / CONFIG}: {error}; {_remedy(stored)}") from error


def config_hash(config: Mapping[str, object]) -> str:
    """Returns the SHA-256 of a config's content as hex text, independent of the order of its fields."""
    return sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def is_thinking_config(stored: object) -> TypeGuard[StoredModel]:
    """Returns True if a JSON value is a dictionary whose field "kind" names a Thinking States model."""
    return isinstance(stored, dict) and stored.get("kind") == KIND


def is_thinking_folder(folder: Path) -> bool:
    """Returns True if the config.json of `folder` has the field "kind" of a Thinking States model."""
    try:
        return is_thinking_config(json.loads((folder / CONFIG).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return False


def _remedy(stored: Mapping[str, object]) -> str:
    """Returns text for an error message: restore the file, or train again with the recorded command."""
    record = stored.get("record")
    command = record.get("command") if isinstance(record, dict) else None
    return f"restore it, or train the model again: {command or 'cacheprobe train thinking-states'}"
