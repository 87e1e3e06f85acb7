"""Loads the multi-token-prediction (MTP) module of a checkpoint, which transformers drops when it loads the model."""

import copy
import re
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError
from transformers.core_model_loading import WeightRenaming, WeightTransform
from transformers.modeling_layers import MtpModel

from cacheprobe.core.live import LiveConfig, LiveModule
from cacheprobe.core.terminal import without_progress_bars
from cacheprobe.lenses.dictionaries.files import read_json
from cacheprobe.models.base import CachedLM, ModelError
from cacheprobe.models.heads.files import open_head
from cacheprobe.models.heads.lm import HeadLM
from cacheprobe.models.heads.mtp import mtp_module
from cacheprobe.models.hf.masks import text_config
from cacheprobe.models.hf.shared import bridge_around
from cacheprobe.models.known import local_file
from cacheprobe.models.plain.lm import PlainLM
from cacheprobe.models.quantised.packed import quantised_text

_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
"""Fields of configs that hold the number of MTP modules."""


class _MimoMtp(MtpModel):
    """Loads the MTP modules of MiMo checkpoints, whose names transformers does not know."""

    def get_weight_conversions(self, main_model: LiveModule) -> list[WeightTransform]:
        """Returns the renamings of the checkpoint's keys. main_model: not used."""
        names = {
            r"^model\.mtp_layers\.": "layers.",
            r"\.token_layernorm\.": ".enorm.",
            r"\.hidden_layernorm\.": ".hnorm.",
            r"\.input_proj\.": ".eh_proj.",
            r"\.final_layernorm\.": ".post_norm.",
            r"^layers\.(\d+)\.(?!(?:enorm|hnorm|eh_proj|post_norm)\.)": r"layers.\1.mtp_block.",
        }
        return [WeightRenaming(source_patterns=old, target_patterns=new) for old, new in names.items()]


class _Layout(NamedTuple):
    """Describes how a checkpoint names the tensors of its MTP module."""

    projection: str
    """Key of the projection, by which the layout is known."""
    start: str
    """Beginning of the keys of all tensors of the module."""
    second: str
    """Beginning of the keys of a second module."""
    loader: type[MtpModel] = MtpModel
    states_first: bool = False


def _layouts(num_layers: int) -> tuple[_Layout, ...]:
    """Returns the layouts of DeepSeek (GLM, Bailing), whose modules are numbered after the model's layers, of Qwen, and
    of MiMo."""
    first, second = f"model.layers.{num_layers}.", f"model.layers.{num_layers + 1}."
    mimo = "model.mtp_layers."
    return (
        _Layout(f"{first}eh_proj.weight", first, second),
        _Layout("mtp.fc.weight", "mtp.", "mtp.layers.1."),
        _Layout(f"{mimo}0.input_proj.weight", mimo, f"{mimo}1.", _MimoMtp, states_first=True),
    )


def load_mtp(model: CachedLM, folder: "str | Path | None" = None) -> HeadLM:
    """Returns the MTP module in the files of a loaded model, as a HeadLM over the last state of that model.

    The files are those of the folder or hub name that the model was loaded from, or those of another folder, where the
    module may stand alone. Embedding, final norm, rotation and unembedding are the model's own modules.
    Raises: ModelError for a model without files, without an MTP module or with several, for pickled or quantised
    weights, missing tensors and wrong shapes, for a module trained for a model of another name, and for a model inside
    a bridge or on several devices.
    """
    plain = usable(getattr(model, "plain", None) or model)  # of a BridgeLM, the PlainLM with the same weights
    live: LiveModule = plain.live
    source = str(folder or live.config.name_or_path or "")
    if folder is not None and (about := Path(folder) / "about.json").exists():  # of `cacheprobe train mtp`
        trained_for = read_json(about).get("model_name")
        if trained_for != plain.name:
            raise ModelError(f"{folder} holds an MTP module of {trained_for}, the model is {plain.name}; use its own")
    layout = _find_layout(plain.name, live.config, plain.n_layers, _keys(plain.name, source))
    stand_in = copy.copy(live)  # the same modules under another config: that of `live` must stay as it is
    stand_in.config = config_with_module(live.config)
    stand_in.config.dtype, stand_in.config.name_or_path = plain.dtype, source
    stand_in._keys_to_ignore_on_load_unexpected = [f"^{re.escape(layout.start)}"]  # MtpModel reads these keys
    try:
        with without_progress_bars():
            family = layout.loader.from_pretrained(stand_in, device_map={"": plain.device})
        if family.has_per_layer_rope:
            raise ValueError("its rotation differs by kind of layer, which is not computed here")
        module = mtp_module(family, live, layout.states_first)
    except (OSError, RuntimeError, ValueError, TypeError, AttributeError, KeyError, SafetensorError) as error:
        raise ModelError(_why(plain.name, source, error)) from error
    note = f"the MTP module in the files of {source}"
    return HeadLM(module, plain, f"{plain.name} MTP", [("S", plain.n_layers - 1)], note=note)


def usable(model: CachedLM) -> PlainLM:
    """Returns the model. Raises: ModelError if an MTP module cannot share its modules."""
    if not isinstance(model, PlainLM) or bridge_around(model.live) is not None:
        raise ModelError(
            f"{model.name} is a {type(model).__name__} or inside a TransformerBridge, and an MTP module shares the "
            "modules of a plain transformers model; give the name or folder of its checkpoint to cp.load_model"
        )
    if text := quantised_text(model.live):
        raise ModelError(
            f"{model.name}: its weights are quantised ({text}), and MTP modules are read from dense weights alone; use "
            "a checkpoint in bfloat16, float16 or float32"
        )
    if len(devices := sorted({str(weight.device) for weight in model.live.parameters()})) > 1:
        raise ModelError(f"{model.name} is on {', '.join(devices)}; to use its MTP module, load it on one device")
    return model


def _keys(name: str, source: str) -> Collection[str]:
    """Returns the names of all tensors in the safetensors files of a folder or hub name. Raises: ModelError if there
    are none."""
    config = local_file(source, "config.json") if source else None
    if config is None:
        raise ModelError(
            f"{name} was made without files, or {source or 'its folder'} is gone, and an MTP module is read from files"
            "; give the name or folder of a checkpoint to cp.load_model"
        )
    if not any(config.parent.glob("*.safetensors")):
        raise ModelError(
            f"{name}: {config.parent} holds no .safetensors file, and MTP modules are read from those alone, since a "
            "pickle may run code; convert its files to safetensors"
        )
    return open_head(config.parent).shapes


def _find_layout(name: str, config: LiveConfig, num_layers: int, keys: Collection[str]) -> _Layout:
    """Returns the layout of the MTP module among the keys of a checkpoint. Raises: ModelError for none or several
    modules."""
    layouts = _layouts(num_layers)
    found = next((layout for layout in layouts if layout.projection in keys), None)
    if found is None:
        config = text_config(config)
        counts = ", ".join(f"{field}={getattr(config, field, None)}" for field in _COUNTS)
        others = sorted(key for key in keys if "mtp" in key or any(key.startswith(one.start) for one in layouts))
        there = f"holds {others[0]}, but no projection" if others else "holds no tensor"
        raise ModelError(
            f"{name}: its checkpoint {there} of an MTP module; looked for "
            f"{' or '.join(one.projection for one in layouts)}, and its config says {counts}. transformers drops these "
            "tensors when it loads and saves a model, so load the published files; or use another drafter"
        )
    if any(key.startswith(found.second) for key in keys):
        raise ModelError(
            f"{name}: its checkpoint holds several MTP modules ({found.start}* and {found.second}*), each for one "
            "further token, and only one that drafts again and again is supported; use another drafter"
        )
    return found


def config_with_module(config: LiveConfig) -> LiveConfig:
    """Returns a copy of a model's config that says that there is one MTP module. Unless the config says otherwise, it
    has full attention, and experts if the model has layers with them."""
    changed = copy.deepcopy(config)
    text = text_config(changed)
    text.num_mtp_layers = 1
    for own, of_model, default in (
        ("mtp_layer_types", "layer_types", "full_attention"),
        ("mtp_mlp_layer_types", "mlp_layer_types", "sparse"),
    ):
        if getattr(text, of_model, None) is not None and not getattr(text, own, None):
            setattr(text, own, [default])
    return changed


def _why(name: str, source: str, error: Exception) -> str:
    """Returns a sentence on an MTP module that could not be loaded."""
    text = " ".join(str(error).split()) or type(error).__name__
    if "are missing from" in text:
        lacking = text.partition("mapping?):")[2].strip()
        return (
            f"{name}: {source} lacks tensors of its MTP module, which transformers names {lacking:.300}; get the whole "
            "checkpoint again"
        )
    if "ignore_mismatched_sizes" in text:
        return (
            f"{name}: tensors of its MTP module in {source} have other shapes than config.json says, as transformers' "
            "log lists; take both from one checkpoint"
        )
    return f"{name}: its MTP module in {source} cannot be loaded: {text:.300}"
