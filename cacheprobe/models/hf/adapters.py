"""Finds LoRA adapters in peft's format, checks that they fit the model, and merges them into its weights.

The adapter (two matrices a layer in a safetensors file) is read without peft. Adapters with more than that are refused
by name.
"""

import json
from pathlib import Path
from typing import Required, TypedDict

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from cacheprobe.core.files import sha256_of_file
from cacheprobe.models.base import ModelError
from cacheprobe.models.facts import sha256_of

SHIPPED_ADAPTERS = Path(__file__).resolve().parents[2] / "data" / "adapters"
"""Inside the package, so that an installed wheel contains them. A folder is named TASK-MODEL."""

WEIGHTS, CONFIG, TRAINING = "adapter_model.safetensors", "adapter_config.json", "training.json"

_PREFIX, _ENDINGS = "base_model.model.", (".lora_A.weight", ".lora_B.weight")

_HARMLESS = frozenset(
    "r lora_alpha lora_dropout target_modules exclude_modules layers_to_transform layers_pattern task_type peft_type "
    "base_model_name_or_path peft_version auto_mapping inference_mode init_lora_weights revision megatron_core "
    "qalora_group_size loftq_config eva_config corda_config lora_ga_config".split()
)
"""Settings of a LoraConfig that do not change the trained product scale * B @ A."""


class LoraConfig(TypedDict, total=False):
    """The fields of adapter_config.json that are read here."""

    peft_type: str
    r: Required[int]
    lora_alpha: Required[float]
    base_model_name_or_path: str


def adapter_directory(adapter: "str | Path", model: str) -> Path:
    """Returns the directory of an adapter, given a path or the task name of a shipped adapter.

    Raises: ModelError naming the shipped adapters.
    """
    name = str(adapter)
    shipped = SHIPPED_ADAPTERS / f"{name.replace('_', '-')}-{model}"
    if name and "/" not in name and shipped.is_dir():
        return shipped
    if Path(name).is_dir() and name:
        return Path(name)
    there = sorted(path.name for path in SHIPPED_ADAPTERS.glob("*/") if path.is_dir())
    raise ModelError(
        f"unknown adapter {name!r} for {model}: it is no directory, and the shipped ones (TASK-MODEL) are "
        f"{', '.join(there) or 'none'}; train one with: cacheprobe train lora --model {model} --out DIR"
    )


def merge_adapter(live: nn.Module, name: str, directory: Path) -> str:
    """Adds scale * B @ A to the weights of a plain float32 model, in place. Returns a note for `weights_note`.

    Raises: ModelError for an adapter of another base model, other shapes or another kind, before any weight is changed.
    Source: Hu et al. 2021, arXiv 2106.09685, section 4.1.  Twin: peft's own layers, unmerged, close(1e-5) in float32.
    """
    config = read_config(directory)
    check_base(live, name, directory, config)
    pairs = _read_pairs(directory)
    rank = int(config["r"])
    weights = dict(live.named_parameters())
    for module, (down, up) in pairs.items():
        weight = weights.get(f"{module}.weight")
        expected = None
        if weight is not None and weight.dim() == 2:
            expected = ((rank, weight.shape[1]), (weight.shape[0], rank))
        if expected != (tuple(down.shape), tuple(up.shape)):
            raise ModelError(
                f"{directory}: {module} has matrices {tuple(down.shape)} and {tuple(up.shape)}, but {name} takes "
                f"{expected or 'none there'} at rank {rank}; the adapter belongs to another model"
            )
    with torch.no_grad():
        for module, (down, up) in pairs.items():
            weights[f"{module}.weight"].add_((config["lora_alpha"] / rank) * (up.float() @ down.float()))
    return f"LoRA adapter {directory.name} of rank {rank} merged in"


def read_config(directory: Path) -> LoraConfig:
    """Returns adapter_config.json of a plain LoRA adapter. Raises: ModelError for a broken file or another kind of
    adapter."""
    try:
        config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
        rank, alpha = config["r"], config["lora_alpha"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{directory} is no adapter: {CONFIG} is absent or broken ({error!s:.120})") from error
    if config.get("peft_type") != "LORA":
        raise ModelError(f"{directory} is a {config.get('peft_type')} adapter; only LORA is merged here")
    if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float):
        raise ModelError(f"{directory}: rank {rank!r} and lora_alpha {alpha!r} are not a rank and a number")
    more = [key for key, value in config.items() if key not in _HARMLESS and value and (key, value) != ("bias", "none")]
    if more:
        raise ModelError(
            f"{directory} sets {more[0]}={config[more[0]]!r}, which is more than LoRA's two matrices; merge it with "
            "peft and load the merged model's directory"
        )
    return config


def check_base(live: nn.Module, name: str, directory: Path, config: LoraConfig) -> None:
    """Checks that an adapter was trained on this base model: by the weight hash in training.json, or else by name.

    live: the base model in float32, before any adapter.
    Raises: ModelError for another base model.
    """
    base = config.get("base_model_name_or_path") or "an unnamed model"
    training = directory / TRAINING
    if training.is_file():
        try:
            told = json.loads(training.read_text(encoding="utf-8"))
            expected, content = told["base_weights_sha256"], told["adapter_sha256"]
        except (ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{training} is broken ({error!s:.120}); train again, or remove it") from error
        if content != file_sha256(directory / WEIGHTS):
            raise ModelError(f"{directory}: {WEIGHTS} is not the file that {TRAINING} speaks of; train again")
        held = base_sha256(live)
        if held != expected:
            kind = told.get("base_weights_note") or "its weights as they were"
            raise ModelError(
                f"{directory} was trained on {base} (weights {expected}), not on {name} (weights {held}); load {base}, "
                f"{kind}, with it"
            )
    elif Path(str(base)).name != Path(name).name:
        raise ModelError(f"{directory} was trained on {base}, not on {name}; load {base} with it")


def base_sha256(live: nn.Module) -> str:
    """Returns the hash of a plain model's parameters, including their names."""
    return sha256_of(sorted(live.named_parameters(), key=lambda item: item[0]))


def file_sha256(path: Path) -> str:
    """Returns the SHA-256 of a file. Raises: ModelError if the file cannot be read."""
    try:
        return sha256_of_file(path)
    except OSError as error:
        raise ModelError(f"{path.parent} holds no {path.name} ({error.strerror})") from error


def _read_pairs(directory: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns (A [rank, in], B [out, rank]) of every adapted layer, keyed by module path."""
    path = directory / WEIGHTS
    if not path.is_file():
        pickled = (
            " (its adapter_model.bin is a pickle, which is never read)" * (directory / "adapter_model.bin").exists()
        )
        raise ModelError(f"{directory} holds no {WEIGHTS}{pickled}; save it with peft's safe_serialization=True")
    try:
        with safe_open(path, "pt") as stored:
            tensors = {key: stored.get_tensor(key) for key in stored.keys()}
    except SafetensorError as error:
        raise ModelError(f"{path} is broken ({error!s:.120})") from error
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for key in tensors:
        ending = next((ending for ending in _ENDINGS if key.endswith(ending)), None)
        module = key.removesuffix(ending or "")
        others = [module + ending for ending in _ENDINGS]
        if ending is None or not key.startswith(_PREFIX) or not all(other in tensors for other in others):
            raise ModelError(f"{path} holds {key}, which is no pair of LoRA matrices of a layer; merge it with peft")
        pairs[module.removeprefix(_PREFIX)] = (tensors[others[0]], tensors[others[1]])
    if not pairs:
        raise ModelError(f"{path} holds no matrices")
    return pairs
