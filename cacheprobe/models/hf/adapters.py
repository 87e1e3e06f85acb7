"""Finds LoRA adapters in peft's format, checks that they fit the model, and merges them into its weights.

The adapter (two matrices a layer in a safetensors file) is read without peft. An adapter with other trained parts is
refused, and the error names the setting.
"""

import json
from pathlib import Path
from typing import Required, TypedDict

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from cacheprobe.core.files import sha256_of_file
from cacheprobe.models.base import ModelError
from cacheprobe.models.weights import sha256_of

SHIPPED_ADAPTERS = Path(__file__).resolve().parents[2] / "data" / "adapters"
"""Folder of the shipped adapters, inside the package, so that an installed wheel contains them. Each adapter's folder
is named TASK-MODEL."""

WEIGHTS, CONFIG, TRAINING = "adapter_model.safetensors", "adapter_config.json", "training.json"

_PREFIX, _ENDINGS = "base_model.model.", (".lora_A.weight", ".lora_B.weight")

_HARMLESS = frozenset(
    "r lora_alpha lora_dropout target_modules exclude_modules layers_to_transform layers_pattern task_type peft_type "
    "base_model_name_or_path peft_version auto_mapping inference_mode init_lora_weights revision megatron_core "
    "qalora_group_size loftq_config eva_config corda_config lora_ga_config".split()
)
"""Settings of a LoraConfig that do not change the trained product scale * B @ A."""


class LoraConfig(TypedDict, total=False):
    """Holds the fields of peft's adapter_config.json that cacheprobe reads (a TypedDict)."""

    peft_type: str
    r: Required[int]
    lora_alpha: Required[float]
    base_model_name_or_path: str


def adapter_directory(adapter: "str | Path", model: str) -> Path:
    """Returns the directory of a LoRA adapter for the model called `model`. adapter: a directory, or the task name of a
    shipped adapter, such as "coin-flip".

    Raises: ModelError, naming the shipped adapters, for text that is neither.
    """
    name = str(adapter)
    shipped = SHIPPED_ADAPTERS / f"{name.replace('_', '-')}-{model}"
    if name and "/" not in name and shipped.is_dir():
        return shipped
    if Path(name).is_dir() and name:
        return Path(name)
    shipped_names = sorted(path.name for path in SHIPPED_ADAPTERS.glob("*/") if path.is_dir())
    raise ModelError(
        f"unknown adapter {name!r} for {model}: it is no directory, and the shipped ones (TASK-MODEL) are "
        f"{', '.join(shipped_names) or 'none'}; train one with: cacheprobe train lora --model {model} --out DIR"
    )


def merge_adapter(live: nn.Module, name: str, directory: Path) -> str:
    """Merges a LoRA adapter into a plain float32 model, in place: adds scale * B @ A to each adapted weight. Returns
    one line of text for `weights_note`.

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
    """Returns the content of a plain LoRA adapter's adapter_config.json as a dictionary. Raises: ModelError for a
    missing or broken file, another kind of adapter, or a setting that plain LoRA does not have."""
    try:
        config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
        rank, alpha = config["r"], config["lora_alpha"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(f"{directory} is no adapter: {CONFIG} is absent or broken ({error!s:.120})") from error
    if config.get("peft_type") != "LORA":
        raise ModelError(f"{directory} is a {config.get('peft_type')} adapter; only LORA is merged here")
    if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float):
        raise ModelError(f"{directory}: rank {rank!r} and lora_alpha {alpha!r} are not a rank and a number")
    used = [key for key, value in config.items() if value and (key, value) != ("bias", "none")]
    unsupported = [key for key in used if key not in _HARMLESS]
    if unsupported:
        raise ModelError(
            f"{directory} sets {unsupported[0]}={config[unsupported[0]]!r}, which is more than LoRA's two matrices; "
            "merge it with peft and load the merged model's directory"
        )
    return config


def check_base(live: nn.Module, name: str, directory: Path, config: LoraConfig) -> None:
    """Checks that a LoRA adapter was trained on the base model `live`: by the weights' hash in the adapter's
    training.json, or by the last part of the model's name if that file is absent.

    live: the base model in float32, before any adapter.
    Raises: ModelError for another base model, for a broken training.json, and for adapter weights other than those that
    training.json records.
    """
    base = config.get("base_model_name_or_path") or "an unnamed model"
    training = directory / TRAINING
    if training.is_file():
        try:
            training_record = json.loads(training.read_text(encoding="utf-8"))
            expected, adapter_sha256 = training_record["base_weights_sha256"], training_record["adapter_sha256"]
        except (ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{training} is broken ({error!s:.120}); train again, or remove it") from error
        if adapter_sha256 != file_sha256(directory / WEIGHTS):
            raise ModelError(f"{directory}: {WEIGHTS} is not the file that {TRAINING} speaks of; train again")
        own_sha256 = base_sha256(live)
        if own_sha256 != expected:
            kind = training_record.get("base_weights_note") or "its weights as they were"
            raise ModelError(
                f"{directory} was trained on {base} (weights {expected}), not on {name} (weights {own_sha256}); load "
                f"{base}, {kind}, with it"
            )
    elif Path(str(base)).name != Path(name).name:
        raise ModelError(f"{directory} was trained on {base}, not on {name}; load {base} with it")


def base_sha256(live: nn.Module) -> str:
    """Returns the first 16 hex digits of a SHA-256 over a plain model's parameters (names, shapes and bytes), sorted by
    name."""
    return sha256_of(sorted(live.named_parameters(), key=lambda item: item[0]))


def file_sha256(path: Path) -> str:
    """Returns the SHA-256 of a file as hex text. Raises: ModelError if the file cannot be read."""
    try:
        return sha256_of_file(path)
    except OSError as error:
        raise ModelError(f"{path.parent} holds no {path.name} ({error.strerror})") from error


def _read_pairs(directory: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns a dictionary: module path -> its two LoRA matrices (A [rank, in], B [out, rank])."""
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
