"""Writes dictionaries in SAELens' format."""

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from cacheprobe.core.files import write_json, write_whole
from cacheprobe.core.values import Json
from cacheprobe.lenses.dictionaries.config import TOPK, DictionaryConfig
from cacheprobe.lenses.dictionaries.formats import CONFIG, WEIGHTS

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
