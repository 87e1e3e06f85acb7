"""Loads a transformers model and its tokenizer from a name or directory, and refuses configs, devices and files that do
not fit."""

import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError

from cacheprobe.core.config import AUTO, DTYPES
from cacheprobe.core.live import LiveConfig, LiveModule, LiveTokenizer
from cacheprobe.core.terminal import without_progress_bars
from cacheprobe.models.base import ModelError
from cacheprobe.models.checks import LONGEST_PROBE
from cacheprobe.models.converted import cache_directory
from cacheprobe.models.hf.masks import chunk_size, sliding_window, text_config
from cacheprobe.models.known import (
    EMBEDDED,
    embedded_directory,
    embedded_state,
    require_known,
    shipped,
    why_no_hub,
)
from cacheprobe.models.quantised.gguf import gguf_directory, gguf_file
from cacheprobe.models.quantised.packed import (
    convert_dense,
    dequantising,
    described,
    mark_dequantised,
    require_method,
    stored_quantisation,
)

if TYPE_CHECKING:  # they take seconds to load
    from transformers import AutoTokenizer


SLIDING_FAMILIES = (
    *("mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "cohere2", "cwm", "exaone4", "granite_swa", "llama4_text"),
    *("ministral", "modernbert-decoder", "olmo3", "vaultgemma", "gpt_oss", "afmoe", "cohere2_moe", "exaone_moe"),
    *("flint", "granitemoe_swa", "kolibri1", "mimo_v2_flash"),
    *("gemma3", "gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text", "llama4"),
)
"""Model types whose sliding windows or chunks were compared with Hugging Face's own, on longer texts. Of a multimodal
model, its own type and that of its text decoder are asked for."""


RECURRENT_KINDS = ("linear_attention", "conv", "hybrid")
"""Kinds of layers whose state our cache keeps after every token; a hybrid one has keys and values, too."""
_KNOWN_KINDS = ("full_attention", "sliding_attention", "chunked_attention", *RECURRENT_KINDS, "mlp", "moe")
_RECURRENT_FAMILIES = ("rwkv", "xlstm")
"""Model types whose layers are all recurrent, without a list of kinds."""


def has_recurrent_layers(config: LiveConfig) -> bool:
    """Returns True if a config lists layers that keep a recurrent state."""
    config = text_config(config)
    is_named = getattr(config, "model_type", None) in _RECURRENT_FAMILIES
    return is_named or bool({*RECURRENT_KINDS} & set(getattr(config, "layer_types", None) or ()))


def refuse_unknown_memory(config: LiveConfig, architecture: str) -> None:
    """Checks a model's config for parts that our KVCache cannot compute or roll back. Raises: ModelError for
    encoder-decoders, recurrent states, local or bidirectional attention, several residual streams, keys of another
    model, and windows that no test covers."""
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{architecture} is an encoder-decoder; cacheprobe runs decoder-only models")
    types = {config.model_type, text_config(config).model_type}
    config = text_config(config)
    kinds = set(getattr(config, "layer_types", None) or ())
    others = sorted(kinds - {*_KNOWN_KINDS})
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
    # "vision": only the tokens of images see later ones; `check_model` tries whether a text stays causal
    if getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision"):
        raise ModelError(f"{architecture} attends in both directions; cacheprobe runs models that generate")
    if (streams := getattr(config, "altup_num_inputs", 1)) > 1:
        raise ModelError(
            f"{architecture} has {streams} residual streams (AltUp), of which attention and MLP change one and the "
            "logits read all, so no single S, T or C is what a layer computes; use a model with one stream"
        )
    if 0 < getattr(config, "num_hidden_layers", 0) <= (getattr(config, "num_kv_shared_layers", 0) or 0):
        raise ModelError(
            f"{architecture} has no keys and values of its own: all its layers read another model's, for which it "
            "drafts; give that model"
        )
    window = sliding_window(config) or chunk_size(config)
    is_tried = types <= set(SLIDING_FAMILIES) or (window is not None and window + 8 <= LONGEST_PROBE)
    is_whole = window is not None and window >= (getattr(config, "max_position_embeddings", None) or window + 1)
    if window is not None and not is_whole and not is_tried:
        raise ModelError(
            f"{architecture} attends over a window of {window}; set config.sliding_window=None and stay within it, or "
            f"use a model with full attention. Windows are tried for {', '.join(SLIDING_FAMILIES)}"
        )
    for field in (
        "attention_window_size",
        "attention_chunk_size",
        "state_size",
        "ssm_state_size",
        "linear_num_value_heads",
        "mamba_d_state",
    ):
        if has_recurrent_layers(config):  # `check_model` compares what they compute at load
            break
        if getattr(config, field, None) and not (field == "attention_chunk_size" and kinds):
            raise ModelError(
                f"{architecture} keeps a bounded or recurrent state ({field}), whose rollback is not defined yet; "
                "use a model with full attention in every layer"
            )


KINDS = ("cpu", "cuda")
PLANS = ("auto", "balanced", "balanced_low_0", "sequential")
"""Names of device maps that transformers computes itself."""

Device = str | int | torch.device
DeviceMap = Mapping[str, Device] | str


def checked_device(device: Device) -> torch.device:
    """Returns `device` as a torch.device. Raises: ModelError for any device but the CPU and the CUDA GPUs that torch
    finds on this machine."""
    try:
        checked = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ModelError(f"unknown device {device!r}; give cpu, cuda or cuda:NUMBER") from error
    if checked.type not in KINDS:
        raise ModelError(f"device {str(checked)!r} is not supported; cacheprobe runs on {' and '.join(KINDS)}")
    if checked.type == "cuda":
        if not torch.cuda.is_available():
            raise ModelError(
                f"device {str(checked)!r} was asked for, and torch {torch.__version__} finds no CUDA GPU here; install "
                "a CUDA build of torch on a machine with one, or use device='cpu'"
            )
        if (checked.index or 0) >= (count := torch.cuda.device_count()):
            raise ModelError(f"device {str(checked)!r} was asked for; there are cuda:0 to {count - 1}")
    return checked


def placement(device: Device | None, device_map: "DeviceMap | None", adapter: object = None) -> "DeviceMap | None":
    """Returns the `device_map` argument for transformers' from_pretrained: a dict (part of the model -> device), or the
    name of a plan such as "auto"; None if no map is given and the device is the CPU.

    Raises: ModelError if both `device` and `device_map` are given, or both `device_map` and `adapter`; for an unknown
    plan, an absent device, and weights left on the disk.
    """
    if device is not None and device_map is not None:
        raise ModelError("give device= or device_map=, not both")
    if device_map is None:
        own_device = checked_device(device) if device is not None else torch.device("cpu")
        return None if own_device.type == "cpu" else {"": str(own_device)}
    if adapter is not None:
        raise ModelError("an adapter is merged on one device; merge it with peft first, or give device=")
    if isinstance(device_map, str):
        if device_map in PLANS:
            return device_map
        raise ModelError(f"unknown device_map {device_map!r}; give one of {', '.join(PLANS)}, or a dict by module")
    if not isinstance(device_map, Mapping) or not device_map:
        raise ModelError(f"device_map is {device_map!r:.60}; give a dict such as {{'': 'cuda:0'}}, or 'auto'")
    for part, target in device_map.items():
        if target == "disk":
            raise ModelError(f"device_map leaves {part or 'the model'} on the disk, where hooks find no weights")
    numbered = {part: f"cuda:{target}" if type(target) is int else target for part, target in device_map.items()}
    return {part: str(checked_device(target)) for part, target in numbered.items()}


def require_placed(model: torch.nn.Module, name: str) -> None:
    """Checks that transformers loaded every weight of a model. Raises: ModelError if memory did not suffice, so that
    weights were left on the disk (torch's "meta" device)."""
    if away := [path for path, weight in model.named_parameters() if weight.device.type == "meta"]:
        raise ModelError(
            f"{name}: there was no room for {len(away)} weights, such as {away[0]}, which were left on the disk; use "
            "more or larger devices, or another dtype"
        )


_LARGE_BYTES = 500 * 2**20


def plain_model(
    model: "str | Path",
    dtype_name: str,
    tokenizer: LiveTokenizer = None,
    *,
    device_map: "DeviceMap | None" = None,
    trust_remote_code: bool = False,
    progress: bool = True,
) -> tuple[LiveModule, LiveTokenizer, str]:
    """Loads a model with transformers from a name or directory. Returns (model, tokenizer or None, note); the note says
    that its weights are quantised or dequantised, or that code of the model's own was run; "" for other models.

    dtype_name: "auto" for that of the files.  tokenizer: returned unchanged if given.  device_map: as returned by
    `placement`.  trust_remote_code: run Python files that come with the model, if transformers does not know its type.
    Raises: ModelError for a model that cannot be loaded, whose memory cannot be rolled back, whose quantisation is
    unknown or needs a library that is not installed, or whose files lack weights: transformers would fill them with
    random numbers.
    """
    name = str(model)
    require_known(name)
    source, quantised, note, floats = name, "", "", None
    if name in EMBEDDED:
        source, note = _embedded(name, progress)
    elif (gguf := gguf_file(name)) is not None:
        folder, quantised, note = gguf_directory(gguf, progress)
        source, floats = str(folder), None if quantised else gguf
    is_local = Path(source).is_dir() or bool(why_no_hub())

    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    try:
        own_code = require_no_own_code(source, is_local, trust_remote_code)
        trusted = {"local_files_only": is_local, "trust_remote_code": bool(own_code)}  # False: transformers never asks
        config = AutoConfig.from_pretrained(source, **trusted)
        if dtype_name == AUTO and str(config.dtype or torch.float32).removeprefix("torch.") not in DTYPES:
            dtype_name = "float32"  # float8
        architecture = (config.architectures or [type(config).__name__])[0]
        refuse_unknown_memory(config, architecture)
        dequantised: dict[str, object] = {}
        if (stored := stored_quantisation(config)) is not None and (method := require_method(name, stored)).dequantises:
            dequantised, quantised = dequantising(method), described(stored)
        has_bar = progress and _is_large(source)
        with nullcontext() if has_bar else without_progress_bars(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "You passed `quantization_config`")  # on purpose: it dequantises
            of_folder = partial(AutoModelForCausalLM.from_pretrained, source)
            load = of_folder if floats is None else partial(_of_floats, floats, config)
            loaded: LiveModule = load(
                dtype=getattr(torch, dtype_name, AUTO),
                device_map=device_map,
                output_loading_info=True,
                **trusted,
                **dequantised,
            )
        live, info = loaded
        if missing := sorted(info["missing_keys"]):
            raise ModelError(
                f"{name}: its files lack {len(missing)} of the weights of a {architecture}, such as {missing[0]}; get "
                "the whole model again"
            )
        require_placed(live, name)
        if dtype_name != AUTO:
            convert_dense(live, getattr(torch, dtype_name))
        if quantised:
            mark_dequantised(live, quantised)
        if tokenizer is None:
            tokenizer = _tokenizer_or_none(AutoTokenizer, source, trusted)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError, SafetensorError) as error:
        raise error if isinstance(error, ModelError) else ModelError(_why(name, source, error)) from error
    return live, tokenizer, "; ".join(filter(None, (quantised, note, own_code)))


def _of_floats(gguf: Path, config: LiveConfig, **options: object) -> LiveModule:
    """Returns what from_pretrained gives with these options for the weights of a GGUF file of floats."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    from cacheprobe.models.quantised.convert import float_weights

    kind: LiveModule = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]  # AutoModelForCausalLM needs a folder with weights
    return kind.from_pretrained(None, config=config, state_dict=float_weights(gguf), **options)


def _is_large(source: str) -> bool:
    """Returns whether a model takes more than a second or two to load: if its files are large, or not known to be
    here. For the others a bar of progress would only break an error of one line."""
    sizes = [path.stat().st_size for path in Path(source).glob("*.safetensors")]
    return not Path(source).is_dir() or sum(sizes) > _LARGE_BYTES


def require_no_own_code(source: str, is_local: bool, trust_remote_code: bool = False) -> str:
    """Returns a note on the Python files that come with a model and are needed to run it; "" if transformers knows the
    model's type. Raises: ModelError if they are needed and trust_remote_code is False."""
    from transformers import CONFIG_MAPPING, PretrainedConfig

    config, _ = PretrainedConfig.get_config_dict(source, local_files_only=is_local)
    code = config.get("auto_map") or {}
    if not code or config.get("model_type") in CONFIG_MAPPING:
        return ""
    files = ", ".join(sorted({str(one).rpartition("--")[2].split(".")[0] + ".py" for one in code.values()}))
    if not trust_remote_code:
        raise ModelError(
            f"{source} needs Python code of its own ({files:.200}), which is not run; read it, and if you trust it, "
            "say cp.load_model(..., trust_remote_code=True)"
        )
    return f"code of the model's own was run: {files:.200}"


def _why(name: str, source: str, error: Exception) -> str:
    """Returns a sentence on a model that transformers could not load. source: the folder or hub name that it was given
    for `name`."""
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if source != name and Path(source).parent == cache_directory():
        is_damaged = isinstance(error, SafetensorError | OSError) or "ignore_mismatched_sizes" in str(error)
        remedy = f" is damaged ({first_line}); remove it, and load the model again" if is_damaged else f": {first_line}"
        return f"{name}: its converted folder {source}{remedy}"
    if not Path(source).is_dir():
        choice = f"shipped: {', '.join(shipped())}; else give a hub name or a directory"
        return f"unknown model {name!r}: {first_line}; {choice}"
    if isinstance(error, SafetensorError):
        return f"{name}: a file of its weights is damaged ({first_line}); get it again"
    if "ignore_mismatched_sizes" in str(error):
        return f"{name}: its weights have other shapes than its config.json says; take both from one model"
    if "no file named" in str(error):
        return f"{name}: there are no weights beside config.json; put model.safetensors, or its shards, there"
    return f"{name}: {first_line}"


def _embedded(name: str, progress: bool) -> tuple[str, str]:
    """Returns (folder, note about the weights) of a model of EMBEDDED; the hub's weights and "" if its packages are
    absent. Raises: ModelError if they are not on the hub either."""
    model = EMBEDDED[name]
    if embedded_state(name) in ("converted", "installed"):
        return str(embedded_directory(name, progress)), model.weights
    absent = f"{name} is not here: {model.title} is not installed: {model.install}"
    if not model.hub:
        raise ModelError(absent)
    from huggingface_hub import snapshot_download

    try:
        files = ["*.json", "*.safetensors", "*.txt"]
        return snapshot_download(model.hub, allow_patterns=files, local_files_only=bool(why_no_hub())), ""
    except Exception as error:  # whatever the network, the hub or its cache object to
        raise ModelError(f"{absent}; nor can it be had from the hub as {model.hub}") from error


def _tokenizer_or_none(auto_tokenizer: "type[AutoTokenizer]", source: str, trusted: dict[str, bool]) -> LiveTokenizer:
    """Returns the tokenizer of `source`, a directory or hub name; None for a directory without tokenizer files."""
    is_directory = Path(source).is_dir()
    has_one = any(
        (Path(source) / f).exists()
        for f in ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")
    )
    return auto_tokenizer.from_pretrained(source, **trusted) if has_one or not is_directory else None
