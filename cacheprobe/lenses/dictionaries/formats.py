"""Reads dictionaries of SAELens, Gemma Scope and Qwen-Scope: finds out the format, and gives config and tensors. Writes
them in SAELens' format.

Tensors have SAELens' names and shapes, whatever the format: W_enc [d_in, d_sae], b_enc [d_sae], W_dec [d_sae, d_out],
b_dec [d_out]; threshold [d_sae] for jumprelu; b_gate, b_mag and r_mag [d_sae] for gated, without b_enc; W_skip [d_out,
d_in] for skip transcoders.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from cacheprobe.core.files import write_json, write_whole
from cacheprobe.core.hook_names import gemma_scope_hooks, hook_name
from cacheprobe.core.values import Json
from cacheprobe.lenses.dictionaries import files
from cacheprobe.lenses.dictionaries.config import (
    GATED,
    JUMPRELU,
    TOPK,
    DictionaryConfig,
    DictionaryError,
    config_of_saelens,
)

CONFIG, WEIGHTS = "cfg.json", "sae_weights.safetensors"
"""Files of SAELens' folder."""
_SCOPE_CONFIG, _SCOPE_WEIGHTS, _SCOPE_ARRAYS = "config.json", "params.safetensors", "params.npz"
"""Files of Gemma Scope: the first two for Gemma 3, the last for Gemma 2."""
_SCOPE_NAMES = {"w_enc": "W_enc", "b_enc": "b_enc", "w_dec": "W_dec", "b_dec": "b_dec", "threshold": "threshold"}
_SKIP = "affine_skip_connection"
Read = tuple[DictionaryConfig, dict[str, Tensor]]


@dataclass(frozen=True)
class Said:
    """Holds what the caller says of a dictionary whose files do not say it. None: the files say it."""

    hook: str | None = None
    k: int | None = None
    architecture: str | None = None


def read_dictionary(path: Path, said: Said) -> Read:
    """Returns (config, tensors in float32) of a folder or a file. Raises: DictionaryError, which names the file."""
    readers = {".pt": _torch_file, ".npz": _gemma_arrays, ".safetensors": _beside_config}
    try:
        if path.suffix != ".pt" and (said.k, said.architecture) != (None, None):
            raise ValueError("k= and architecture= are for .pt files; other files say both")
        if path.is_dir():
            read = next((read for name, read in _FOLDERS.items() if (path / name).exists()), None)
        else:
            read = readers.get(path.suffix)
        if read is None:
            ends = f"a folder with one of {', '.join(_FOLDERS)}, or a file that ends with {', '.join(readers)}"
            raise ValueError(f"a dictionary is {ends}")
        return read(path, said)
    except (OSError, ValueError, RecursionError) as error:
        raise DictionaryError(f"{path}: no dictionary could be read ({error!s:.300})") from error


def shapes_of(config: DictionaryConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each tensor of a dictionary, by SAELens' names."""
    features = (config.d_sae,)
    shapes = {"W_enc": (config.d_in, config.d_sae), "W_dec": (config.d_sae, config.d_out), "b_dec": (config.d_out,)}
    if config.activation == GATED:
        return shapes | {"b_gate": features, "b_mag": features, "r_mag": features}
    shapes["b_enc"] = features
    if config.activation == JUMPRELU:
        shapes["threshold"] = features
    return shapes | ({"W_skip": (config.d_out, config.d_in)} if config.has_skip else {})


def _saelens_folder(folder: Path, said: Said) -> Read:
    """Reads a folder that SAELens' `save_model` or `save_inference_model` wrote."""
    config = config_of_saelens(files.read_json(folder / CONFIG), said.hook)
    tensors = files.read_tensors(folder / WEIGHTS)
    if "scaling_factor" in tensors and not bool((tensors.pop("scaling_factor") == 1).all()):
        raise ValueError("scaling_factor is not 1; versions of SAELens since 6 do not apply it")
    return config, tensors


def _gemma_folder(folder: Path, said: Said) -> Read:
    """Reads a folder of Gemma Scope 2."""
    return _gemma_tensors(folder / _SCOPE_WEIGHTS, files.read_json(folder / _SCOPE_CONFIG), said)


def _beside_config(path: Path, said: Said) -> Read:
    """Reads a safetensors file by the config that lies beside it: SAELens' or Gemma Scope's."""
    if path.name == WEIGHTS:
        return _saelens_folder(path.parent, said)
    return _gemma_tensors(path, files.read_json(path.parent / _SCOPE_CONFIG), said)


def _gemma_arrays(path: Path, said: Said) -> Read:
    """Reads Gemma Scope's arrays for Gemma 2: `params.npz`, or its folder. Source: SAELens 6.54,
    `gemma_2_sae_huggingface_loader`."""
    return _gemma_tensors(path / _SCOPE_ARRAYS if path.is_dir() else path, {"architecture": "jump_relu"}, said)


def _gemma_tensors(path: Path, stored: Mapping[str, Json], said: Said) -> Read:
    """Reads Gemma Scope's tensors, whose hook points only the names of their folders say. Source: SAELens 6.54,
    `gemma_3_sae_huggingface_loader`."""
    if stored.get("architecture") != "jump_relu":
        raise ValueError(f"unknown architecture {stored.get('architecture')!r:.60}; Gemma Scope has jump_relu")
    named = {_SCOPE_NAMES.get(name.lower(), name): tensor for name, tensor in files.read_tensors(path).items()}
    if _SKIP in named:
        named["W_skip"] = named.pop(_SKIP).T.contiguous()
    if lacking := [name for name in ("W_enc", "W_dec") if name not in named or named[name].dim() != 2]:
        raise ValueError(f"{lacking[0]} must be a matrix, and one of several layers is not read")
    (d_in, d_sae), d_out = named["W_enc"].shape, named["W_dec"].shape[1]
    hook, hook_out = gemma_scope_hooks(str(path.absolute())) or (None, None)
    architecture = JUMPRELU
    if hook_out is not None or d_out != d_in:
        architecture = "jumprelu_skip_transcoder" if "W_skip" in named else "jumprelu_transcoder"
    config = DictionaryConfig(
        architecture=architecture,
        d_in=d_in,
        d_sae=d_sae,
        d_out=d_out,
        hook=said.hook or hook,
        hook_out=hook_out,
        apply_b_dec_to_input=False,
        about=dict(stored),
    )
    return config, named


def _torch_file(path: Path, said: Said) -> Read:
    """Reads a file of torch.save with W_enc, b_enc, W_dec and b_dec, as Qwen-Scope has; with a threshold it is
    jumprelu. Matrices may be transposed. Source: SAELens 6.54, `qwen_scope_sae_huggingface_loader`."""
    tensors = files.read_tensors(path)
    if missing := [name for name in ("W_enc", "b_enc", "W_dec", "b_dec") if name not in tensors]:
        raise ValueError(f"{missing[0]} is missing")
    d_sae, d_in = tensors["b_enc"].numel(), tensors["b_dec"].numel()
    if d_sae == d_in:
        raise ValueError(f"it has as many features as inputs, {d_in}, so which axis is which cannot be told")
    if tuple(tensors["W_enc"].shape) == (d_sae, d_in):
        tensors |= {name: tensors[name].T.contiguous() for name in ("W_enc", "W_dec")}
    widths = re.findall(r"L0_(\d{1,6})", path.absolute().as_posix())
    layer = re.search(r"layer(\d{1,6})\.sae\.pt$", path.name)
    k = said.k or (int(widths[-1]) if widths else None)
    architecture = said.architecture or (JUMPRELU if "threshold" in tensors else TOPK if k else None)
    if architecture is None:
        raise ValueError("the file does not say its activation; give k=, or architecture='standard'")
    config = DictionaryConfig(
        architecture=architecture,
        d_in=d_in,
        d_sae=d_sae,
        d_out=d_in,
        hook=said.hook or (hook_name("S", int(layer[1])) if layer else None),
        apply_b_dec_to_input=False,
        k=k if architecture == TOPK else None,
    )
    return config, tensors


_FOLDERS = {CONFIG: _saelens_folder, _SCOPE_WEIGHTS: _gemma_folder, _SCOPE_ARRAYS: _gemma_arrays}
"""Name of the file that a folder of each format has, and its reader."""


_VERSION = "6.0.0"
"""The oldest version of SAELens with this layout of cfg.json."""


def save_saelens(config: DictionaryConfig, tensors: Mapping[str, Tensor], folder: Path) -> Path:
    """Writes cfg.json and sae_weights.safetensors into a folder, and returns the folder.

    Source: SAELens 6.54, `SAE.save_model` and `SAEConfig.to_dict`.
    """
    metadata: dict[str, Json] = {"sae_lens_version": _VERSION, **config.about, "hook_name": config.hook}
    stored: dict[str, Json] = {
        "architecture": config.architecture,
        "d_in": config.d_in,
        "d_sae": config.d_sae,
        "dtype": "float32",
        "device": "cpu",
        "apply_b_dec_to_input": config.apply_b_dec_to_input,
        "normalize_activations": config.normalize_activations,
        "reshape_activations": config.reshape_activations,
    }
    if config.is_transcoder:
        stored["d_out"], metadata["hook_name_out"] = config.d_out, config.hook_out
    if config.architecture == TOPK:
        stored |= {"k": config.k, "rescale_acts_by_decoder_norm": config.rescale_acts_by_decoder_norm}
    kept = {name: tensor.detach().cpu().float().contiguous() for name, tensor in tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).unlink(missing_ok=True)  # a config is there only beside its own weights
    write_whole(folder / WEIGHTS, lambda path: save_file(kept, path))
    write_json(folder / CONFIG, {**stored, "metadata": metadata})
    return folder
