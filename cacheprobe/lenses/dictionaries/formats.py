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

import torch
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
    current = path
    try:
        if path.is_dir():
            if (said.k, said.architecture) != (None, None):
                raise ValueError("k= and architecture= are for .pt files; the files of a folder say both")
            for name, read in _FOLDERS.items():
                current = path / name
                if current.exists():
                    return read(path, said)
            current = path
            raise ValueError(f"it holds none of {', '.join(_FOLDERS)}")
        if path.suffix != ".pt" and (said.k, said.architecture) != (None, None):
            raise ValueError("k= and architecture= are for .pt files; this one says both")
        readers = {".pt": _torch_file, ".npz": _gemma_arrays, ".safetensors": _beside_config}
        if path.suffix not in readers:
            raise ValueError("a dictionary is a folder, or a file that ends with .pt, .npz or .safetensors")
        return readers[path.suffix](path, said)
    except (OSError, ValueError, MemoryError) as error:
        raise DictionaryError(f"{current}: no dictionary could be read ({error!s:.300})") from error


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
    path, wanted = folder / WEIGHTS, shapes_of(config)
    extra = {name: (config.d_sae,) for name in ("scaling_factor",) if name in files.safetensors_shapes(path)}
    tensors = files.read_safetensors(path, {**wanted, **extra})
    for name in extra:
        if not bool((tensors.pop(name) == 1).all()):
            raise ValueError(f"{name} is not 1; versions of SAELens since 6 do not apply it")
    return config, tensors


def _gemma_folder(folder: Path, said: Said) -> Read:
    """Reads a folder of Gemma Scope 2."""
    return _gemma_tensors(folder / _SCOPE_WEIGHTS, files.read_json(folder / _SCOPE_CONFIG), said)


def _beside_config(path: Path, said: Said) -> Read:
    """Reads a safetensors file by the config that lies beside it: SAELens' or Gemma Scope's."""
    if path.name == WEIGHTS:
        return _saelens_folder(path.parent, said)
    return _gemma_tensors(path, files.read_json(path.parent / _SCOPE_CONFIG), said)


def _gemma_tensors(path: Path, stored: Mapping[str, Json], said: Said) -> Read:
    """Reads Gemma Scope 2's tensors. Source: SAELens 6.54, `gemma_3_sae_huggingface_loader`."""
    if stored.get("architecture") != "jump_relu":
        raise ValueError(f"unknown architecture {stored.get('architecture')!r:.60}; Gemma Scope has jump_relu")
    shapes = files.safetensors_shapes(path)
    if len(shapes.get("w_dec", ())) == 3:
        raise ValueError("w_dec writes several layers; cross-layer transcoders are not read")
    config = _gemma_config(path, shapes, stored, said)
    wanted = {name: shapes_of(config)[ours] for name, ours in _SCOPE_NAMES.items()}
    if config.has_skip:
        wanted[_SKIP] = (config.d_in, config.d_out)
    tensors = files.read_safetensors(path, wanted)
    named = {ours: tensors[name] for name, ours in _SCOPE_NAMES.items()}
    return config, named | ({"W_skip": tensors[_SKIP].T.contiguous()} if config.has_skip else {})


def _gemma_arrays(path: Path, said: Said) -> Read:
    """Reads Gemma Scope's arrays for Gemma 2: `params.npz`, or its folder. Source: SAELens 6.54,
    `gemma_2_sae_huggingface_loader`."""
    path = path / _SCOPE_ARRAYS if path.is_dir() else path
    given = files.npz_shapes(path)
    names = {name: _SCOPE_NAMES[name.lower()] for name in given if name.lower() in _SCOPE_NAMES}
    config = _gemma_config(path, {name.lower(): shape for name, shape in given.items()}, {}, said)
    arrays = files.read_npz(path, {name: shapes_of(config)[ours] for name, ours in names.items()})
    if missing := set(shapes_of(config)) - set(names.values()):
        raise ValueError(f"{min(missing)} is missing")
    return config, {ours: arrays[name] for name, ours in names.items()}


def _gemma_config(
    path: Path, shapes: Mapping[str, tuple[int, ...]], stored: Mapping[str, Json], said: Said
) -> DictionaryConfig:
    """Returns the config of a Gemma Scope dictionary, whose hook points only the names of its folders say."""
    encoder, decoder = shapes.get("w_enc", ()), shapes.get("w_dec", ())
    if len(encoder) != 2 or len(decoder) != 2:
        raise ValueError("w_enc and w_dec must be matrices")
    hooks = gemma_scope_hooks(str(path.absolute())) or (None, None)
    is_transcoder = hooks[1] is not None or decoder[1] != encoder[0]
    architecture = JUMPRELU
    if is_transcoder:
        architecture = "jumprelu_skip_transcoder" if _SKIP in shapes else "jumprelu_transcoder"
    return DictionaryConfig(
        architecture=architecture,
        d_in=encoder[0],
        d_sae=encoder[1],
        d_out=decoder[1],
        hook=said.hook or hooks[0],
        hook_out=hooks[1],
        apply_b_dec_to_input=False,
        about=dict(stored),
    )


def _torch_file(path: Path, said: Said) -> Read:
    """Reads a file of torch.save with W_enc, b_enc, W_dec and b_dec, as Qwen-Scope has; with a threshold it is
    jumprelu. Matrices may be transposed. Source: SAELens 6.54, `qwen_scope_sae_huggingface_loader`."""
    tensors = files.read_torch_weights(path)
    if missing := [name for name in ("W_enc", "b_enc", "W_dec", "b_dec") if name not in tensors]:
        raise ValueError(f"{missing[0]} is missing")
    d_sae, d_in = tensors["b_enc"].numel(), tensors["b_dec"].numel()
    if d_sae == d_in:
        raise ValueError(f"it has as many features as inputs, {d_in}, so which axis is which cannot be told")
    is_turned = tuple(tensors["W_enc"].shape) == (d_sae, d_in)
    if is_turned:
        tensors = {
            name: one.T if name in ("W_enc", "W_dec") and one.dim() == 2 else one for name, one in tensors.items()
        }
    named, found = (
        re.findall(r"L0_(\d{1,6})", path.absolute().as_posix()),
        re.search(r"layer(\d{1,6})\.sae\.pt$", path.name),
    )
    k = said.k or (int(named[-1]) if named else None)
    architecture = said.architecture or (JUMPRELU if "threshold" in tensors else TOPK if k else None)
    if architecture is None:
        raise ValueError("the file does not say its activation; give k=, or architecture='standard'")
    config = DictionaryConfig(
        architecture=architecture,
        d_in=d_in,
        d_sae=d_sae,
        d_out=d_in,
        hook=said.hook or (hook_name("S", int(found[1])) if found else None),
        apply_b_dec_to_input=False,
        k=k if architecture == TOPK else None,
    )
    files.require_shapes({name: tuple(one.shape) for name, one in tensors.items()}, shapes_of(config))
    if other := [name for name, one in tensors.items() if one.dtype not in _FLOATS]:
        raise ValueError(f"{other[0]} is of dtype {tensors[other[0]].dtype}, weights are floats of 16 to 64 bits")
    return config, {name: one.float().contiguous() for name, one in tensors.items()}


_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
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
