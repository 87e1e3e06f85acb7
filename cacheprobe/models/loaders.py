"""Loads a CachedLM from a name, a directory, a live transformers model, or a TransformerBridge.

Each transformers model is tested with a short text before it is returned. A model that our KVCache does not support
raises ModelError with the reason.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

from cacheprobe.core.config import DTYPES
from cacheprobe.core.live import LiveModule, LiveTokenizer
from cacheprobe.core.values import JsonDict
from cacheprobe.models.base import CachedLM, ModelError
from cacheprobe.models.devices import Device, DeviceMap, placement
from cacheprobe.models.known import require_known, shipped_folder
from cacheprobe.models.plain.files import plain_model
from cacheprobe.models.plain.load import check_or_replace, wrap_live
from cacheprobe.models.plain.memory import refuse_unknown_memory
from cacheprobe.models.quantised.packed import packed_modules
from cacheprobe.models.settings import in_plain_settings
from cacheprobe.models.thinking.store import is_thinking_folder, load_thinking

if TYPE_CHECKING:  # they take seconds to load
    from cacheprobe.models.hf.bridge import BridgeLM
    from cacheprobe.models.plain.lm import PlainLM
    from cacheprobe.models.thinking.lm import ThinkingLM

PRODUCTS = ("auto", "torch", "kernels")
"""Values of `products` of `load_model`."""


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
    prepend_bos: bool = False,
    trust_remote_code: bool = False,
    progress: bool = True,
) -> CachedLM:
    """Loads and checks a model, and returns it as a CachedLM, ready for `cp.run`.

    model: "smollm2-135m", a shipped Thinking States model such as "coinflip-thinking", a Hugging Face hub name, a local
    directory, a .gguf file, a live transformers model (wrapped in place: TransformerLens replaces its submodules), a
    TransformerBridge, or a live ThinkingModel, such as a ThinkingPretrained. Where TransformerLens has no adapter, the
    plain model runs, and the fingerprint's path is "plain".
    tokenizer: for a live model; without one, prompts must be lists of token ids. It is used as it is, and not changed:
    `model.encode(text)` gives `tokenizer(text).input_ids`. Of a TransformerBridge, the tokenizer as its files configure
    it, without the start token that TransformerLens adds.
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
    prepend_bos: put the tokenizer's start token in front of every text that does not begin with it, as TransformerLens
    does. The trace records this. Token ids and chats are not changed.
    trust_remote_code: for a name or directory whose type transformers does not know: run the Python files that come
    with it. They can do anything that you can; without True, such a model is refused and nothing of it is run.
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
            return _with_start_token(lm, prepend_bos)
        _refuse_thoughts(think_while_decoding, model)
        wrapped = _from_pretrained(
            model,
            tokenizer,
            dtype_name or "float32",
            adapter,
            device_map=checked_map,
            trust_remote_code=trust_remote_code is True,
            progress=progress,
        )
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
        thinking = sys.modules.get("cacheprobe.models.thinking.model")  # a live one has loaded it
        is_thinking = thinking is not None and isinstance(model, thinking.ThinkingModel)
        if not is_thinking:
            _refuse_thoughts(think_while_decoding, f"a live {type(model).__name__}")
        if is_thinking:
            from cacheprobe.models.thinking.lm import ThinkingLM

            wrapped = ThinkingLM(model, tokenizer, _name_of(model))
            if think_while_decoding is not None:
                wrapped.set_think_while_decoding(think_while_decoding)
        elif type(model).__name__ == "TransformerBridge":
            model.eval()
            from cacheprobe.models.hf.bridge import BridgeLM, tokenizer_of_owner

            refuse_unknown_memory(model.original_model.config, type(model.original_model).__name__)
            tokenizer = tokenizer_of_owner(model) if tokenizer is None else tokenizer
            wrapped = BridgeLM(model, _name_of(model), tokenizer=tokenizer)
        elif hasattr(model, "config") and hasattr(model, "forward"):
            refuse_unknown_memory(model.config, type(model).__name__)
            wrapped = wrap_live(model, tokenizer, _name_of(model))
        else:
            raise ModelError(
                f"cannot load a {type(model).__name__}; give a name, a directory, a transformers model or a bridge"
            )
        own_dtype = str(wrapped.dtype).removeprefix("torch.")
        if dtype_name not in (None, own_dtype):
            raise ModelError(
                f"{wrapped.name} is in {own_dtype}, not {dtype_name}; convert it with .to(torch.{dtype_name}) first"
            )
        if is_thinking:
            return _with_start_token(wrapped, prepend_bos)
    checked = check_or_replace(cast("BridgeLM | PlainLM", wrapped))
    if hasattr(checked, "bridge"):
        _set_operations(cast("BridgeLM", checked), products)
    elif products == "kernels":
        raise ModelError(f'{checked.name} runs without a bridge, so torch computes it; use products="auto"')
    elif products == "auto" and checked.mixtures and checked.device.type == "cpu":
        from cacheprobe.models.experts.sites import use_invariant_experts
        from cacheprobe.ops.compiled.choice import choose

        if (operations := choose(checked.dtype, checked.device).operations) is not None:
            plain = cast("PlainLM", checked)
            plain.mixtures = use_invariant_experts(plain.model, operations.product)
    return _with_start_token(checked, prepend_bos)


def _with_start_token(model: CachedLM, prepend_bos: bool) -> CachedLM:
    """Returns the model with its setting `prepend_bos`. Raises: ModelError if its tokenizer has no start token."""
    if prepend_bos and getattr(model.tokenizer, "bos_token_id", None) is None:
        raise ModelError(f"{model.name} has no tokenizer with a start token (bos_token); leave out prepend_bos")
    model.prepend_bos = bool(prepend_bos)
    return model


def _set_operations(model: "BridgeLM", products: str) -> None:
    """Sets the operations of a checked model, as `products` of `load_model` says. Raises: ModelError if kernels are
    required and cannot be used."""
    from cacheprobe.models.experts.sites import use_invariant_experts
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
    product = None if model.operations is None else model.operations.product
    model.mixtures = use_invariant_experts(model.bridge.original_model, product)


def products_of(readings: str) -> str:
    """Returns the value of `products` with which a model computes as the field "readings" of a fingerprint says."""
    return "torch" if readings == "torch" else "kernels" if readings.startswith("Triton") else "auto"


def model_of_run(
    fingerprint: JsonDict, model: str | None = None, adapter: str | None = None, *, progress: bool = True
) -> CachedLM:
    """Loads the model of a stored run, as its fingerprint says. model, adapter: in place of those that it names.

    Raises: ModelError as load_model, and for weights that are not quantised as the run's were.
    """
    loaded = load_model(
        model or fingerprint["model"],
        dtype=fingerprint["dtype"],
        device=fingerprint["device"],
        adapter=adapter or fingerprint.get("adapter"),
        products=products_of(fingerprint.get("readings", "torch")),
        think_while_decoding=fingerprint.get("think_while_decoding"),
        prepend_bos=bool(fingerprint.get("prepend_bos")),
        progress=progress,
    )
    before, now = fingerprint.get("quantised"), loaded.fingerprint().get("quantised")
    if model is None and before != now:
        raise ModelError(
            f"the run's weights were {before or 'not quantised'}, those of {fingerprint['model']} are "
            f"{now or 'not quantised'}; save the run's model with save_pretrained, and give its folder as model="
        )
    return loaded


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
    *,
    device_map: "DeviceMap | None",
    trust_remote_code: bool,
    progress: bool,
) -> CachedLM:
    """Returns a BridgeLM or PlainLM around a transformers model of a name or directory, with the adapter merged."""
    require_known(str(model))  # before what takes seconds to import
    dtype_to_load = dtype_name if adapter is None else "float32"
    map_to_load = device_map if adapter is None else None  # an adapter is merged on the CPU
    live, tokenizer, note = plain_model(
        model,
        dtype_to_load,
        tokenizer,
        device_map=map_to_load,
        trust_remote_code=trust_remote_code,
        progress=progress,
    )
    if adapter is None:
        return wrap_live(live, tokenizer, str(model), note)
    if packed_modules(live):
        raise ModelError(f"{model}: an adapter is merged into dense weights, and these are packed; give a dense model")

    import torch

    from cacheprobe.models.hf.adapters import adapter_directory, merge_adapter

    directory = adapter_directory(adapter, str(model))
    merged = merge_adapter(live, str(model), directory)
    note = "; ".join(filter(None, (note, merged)))
    live = live.to(getattr(torch, dtype_name))
    if isinstance(device_map, Mapping):
        live = live.to(device_map[""])
    wrapped = wrap_live(live, tokenizer, str(model), note)
    wrapped.adapter = str(adapter)
    return wrapped


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
