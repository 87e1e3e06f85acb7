"""Loads a CachedLM from a name, a directory, a live transformers model, or a TransformerBridge.

Each transformers model is tested with a short text before it is returned. A model that our KVCache does not support
raises ModelError with the reason.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack, cast

from cacheprobe.core.config import DTYPES
from cacheprobe.core.live import LiveModule, LiveTokenizer
from cacheprobe.core.values import JsonDict, require_known_options
from cacheprobe.models.base import CachedLM, ModelError
from cacheprobe.models.hf.masks import longrope_length, text_config
from cacheprobe.models.known import require_known, shipped_folder
from cacheprobe.models.plain.files import (
    Device,
    DeviceMap,
    has_recurrent_layers,
    placement,
    plain_model,
    refuse_unknown_memory,
)
from cacheprobe.models.quantised.packed import packed_modules, require_usable
from cacheprobe.models.settings import in_plain_settings
from cacheprobe.models.thinking.store import is_thinking_folder, load_thinking

if TYPE_CHECKING:  # they take seconds to load
    from cacheprobe.models.hf.bridge import BridgeLM
    from cacheprobe.models.plain.lm import PlainLM
    from cacheprobe.models.thinking.lm import ThinkingLM

PRODUCTS = ("auto", "torch", "kernels")
"""Values of `products` of `load_model`."""

NO_ADAPTER = "TransformerBridge has no adapter for it"
_NO_CACHE = "TransformerBridge's forward of it does not take our KV cache"
_RECURRENT = "it has recurrent layers, whose states only the plain model keeps by position"
_PACKED = "its weights are packed, and a bridge reads weights as matrices"
_SCALED = "its blocks scale the residual stream, and TransformerBridge has no hook on that"
WITHOUT_BRIDGE: dict[str, str] = {
    **dict.fromkeys(("bloom", "falcon", "llama4", "llama4_text", "opt", "xglm"), _NO_CACHE),
    **dict.fromkeys(("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"), _SCALED),
}
"""Model type -> why its bridge, which cannot be taken off again, is not tried."""


class LoadOptions(TypedDict, total=False):
    """Holds the settings of `load_model`, which explains them (a TypedDict)."""

    dtype: object
    device: "Device | None"
    device_map: "DeviceMap | None"
    adapter: "str | Path | None"
    products: str
    think_while_decoding: bool | None
    prepend_bos: bool
    trust_remote_code: bool
    progress: bool


@in_plain_settings()
def load_model(
    model: "str | Path | LiveModule" = "smollm2-135m",
    tokenizer: LiveTokenizer = None,
    **options: Unpack[LoadOptions],
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
    products: "auto" (default) computes matrix products and readings in the loops that numba compiles for this
    processor, where they are faster than torch's (`cacheprobe doctor` says where), and on a GPU runs in Triton kernels,
    if all of them pass a trial; "torch" does neither. "kernels" requires the kernels, also in Triton's interpreter on a
    CPU (TRITON_INTERPRET=1), for tests. Results have other bits; the fingerprint records the choice. Thinking States
    models use torch's.
    think_while_decoding: whether a Thinking States model also thinks about chunks that hold generated tokens; the
    window must then be a multiple of the chunk size. Default: the stored setting, which is False for shipped models.
    prepend_bos: True puts the tokenizer's start token in front of every text that does not begin with it, as
    TransformerLens does. The trace records this. Token ids and chats are not changed.
    trust_remote_code: for a name or directory whose type transformers does not know: True runs the Python files that
    come with it. They can do anything that you can; without True, such a model is refused and nothing of it is run.
    progress: False shows no bars and no status lines.
    Raises: ModelError for a model that cannot be loaded, wrapped, or rolled back, for an adapter of another model, for
    an absent device, and for settings of another kind of model; TypeError for an unknown option.
    """
    require_known_options(options, LoadOptions.__annotations__)
    dtype, products = _dtype_name(options.get("dtype")), options.get("products", "auto")
    if products not in PRODUCTS:
        raise ModelError(f"products={products!r} is none of {', '.join(PRODUCTS)}")
    device_map = placement(options.get("device"), options.get("device_map"), options.get("adapter"))
    is_named = isinstance(model, str | Path)
    loaded = _named(model, tokenizer, dtype, device_map, options) if is_named else _live(model, tokenizer, options)
    own_dtype = str(loaded.dtype).removeprefix("torch.")
    if not is_named and dtype not in (None, own_dtype):
        raise ModelError(f"{loaded.name} is in {own_dtype}, not {dtype}; convert it with .to(torch.{dtype}) first")
    thinking = sys.modules.get("cacheprobe.models.thinking.lm")
    if thinking is None or not isinstance(loaded, thinking.ThinkingLM):
        loaded = _with_operations(check_or_replace(cast("BridgeLM | PlainLM", loaded)), products)
    elif (think := options.get("think_while_decoding")) is not None:
        cast("ThinkingLM", loaded).set_think_while_decoding(think)
    prepend_bos = bool(options.get("prepend_bos"))
    if prepend_bos and getattr(loaded.tokenizer, "bos_token_id", None) is None:
        raise ModelError(f"{loaded.name} has no tokenizer with a start token (bos_token); leave out prepend_bos")
    loaded.prepend_bos = prepend_bos
    return loaded


def _named(
    model: "str | Path",
    tokenizer: LiveTokenizer,
    dtype: str | None,
    device_map: "DeviceMap | None",
    options: LoadOptions,
) -> CachedLM:
    """Returns the unchecked model of a name or directory, with the adapter merged."""
    import torch

    name, adapter = str(model), options.get("adapter")
    if not name.strip():
        raise ModelError("the model's name is empty; give a name, a directory or a model")
    own_dtype = getattr(torch, dtype or "float32")
    folder = shipped_folder("checkpoints", name) if "/" not in name else None
    if folder is None and is_thinking_folder(Path(model)):
        folder = Path(model)
    if folder is not None:
        if tokenizer is not None or adapter is not None:
            raise ModelError(
                f"{model} is a Thinking States model with a vocabulary of its own; give no tokenizer or adapter"
            )
        if device_map is not None and (isinstance(device_map, str) or set(device_map) != {""}):
            raise ModelError(f"{model} is small and runs on one device; give device= instead of device_map=")
        return load_thinking(folder, name, own_dtype, str(device_map[""]) if device_map is not None else "cpu")
    _refuse_thoughts(options, name)
    require_known(name)  # before what takes seconds to import
    live, tokenizer, note = plain_model(
        model,
        (dtype or "float32") if adapter is None else "float32",
        tokenizer,
        device_map=device_map if adapter is None else None,  # an adapter is merged on the CPU
        trust_remote_code=options.get("trust_remote_code") is True,
        progress=options.get("progress", True),
    )
    if adapter is None:
        return wrap_live(live, tokenizer, name, note)
    if packed_modules(live):
        raise ModelError(f"{model}: an adapter is merged into dense weights, and these are packed; give a dense model")
    from cacheprobe.models.hf.adapters import adapter_directory, merge_adapter

    merged = merge_adapter(live, name, adapter_directory(adapter, name))
    live = live.to(own_dtype)
    if isinstance(device_map, Mapping):
        live = live.to(device_map[""])
    wrapped = wrap_live(live, tokenizer, name, "; ".join(filter(None, (note, merged))))
    wrapped.adapter = str(adapter)
    return wrapped


def _live(model: LiveModule, tokenizer: LiveTokenizer, options: LoadOptions) -> CachedLM:
    """Returns a CachedLM, unchecked, around a live model of transformers, TransformerLens or cacheprobe."""
    kind = type(model).__name__
    if options.get("device") is not None or options.get("device_map") is not None:
        raise ModelError(f"a live {kind} stays where it is; move it with .to(device) first, or give its name")
    if (adapter := options.get("adapter")) is not None:
        raise ModelError(
            f"adapter={str(adapter)!r} is merged into a model that is loaded by name or directory, not into a live "
            f"{kind}; give its name, or merge it with peft first"
        )
    config = getattr(model, "config", None) or getattr(model, "cfg", None)
    name = str(getattr(config, "name_or_path", None) or getattr(config, "model_name", None) or kind)
    thinking = sys.modules.get("cacheprobe.models.thinking.model")  # a live one has loaded it
    if thinking is not None and isinstance(model, thinking.ThinkingModel):
        from cacheprobe.models.thinking.lm import ThinkingLM

        return ThinkingLM(model, tokenizer, name)
    _refuse_thoughts(options, f"a live {kind}")
    if kind == "TransformerBridge":
        model.eval()
        from cacheprobe.models.hf.bridge import BridgeLM, tokenizer_of_owner

        refuse_unknown_memory(model.original_model.config, type(model.original_model).__name__)
        return BridgeLM(model, name, tokenizer=tokenizer_of_owner(model) if tokenizer is None else tokenizer)
    if not (hasattr(model, "config") and hasattr(model, "forward")):
        raise ModelError(f"cannot load a {kind}; give a name, a directory, a transformers model or a bridge")
    refuse_unknown_memory(model.config, kind)
    return wrap_live(model, tokenizer, name)


def wrap_live(live: LiveModule, tokenizer: LiveTokenizer, name: str, note: str = "") -> "BridgeLM | PlainLM":
    """Returns a BridgeLM around a live transformers model if TransformerLens has an adapter for it; otherwise a
    PlainLM, whose `why` is the reason. Both are unchecked.

    Raises: ModelError with both reasons if neither is possible; for a model inside a bridge made elsewhere; for packed
    weights that cannot be run.
    """
    text = require_usable(live, name)
    note = note if text in note else "; ".join(filter(None, (note, text)))
    if packed_modules(live):
        return _plain(live, tokenizer, name, note, _PACKED)
    try:
        from cacheprobe.models.hf.bridge import BridgeLM
    except ImportError:
        return _plain(live, tokenizer, name, note, "transformer-lens is not installed")
    is_inside = any(type(module).__module__.startswith("transformer_lens") for module in live.modules())
    if not is_inside and has_recurrent_layers(live.config):
        return _plain(live, tokenizer, name, note, _RECURRENT)
    if not is_inside and (why := WITHOUT_BRIDGE.get(str(live.config.model_type))) is not None:
        return _plain(live, tokenizer, name, note, why)
    try:
        return BridgeLM.wrap(live, tokenizer, name, note)
    except ModelError as no_bridge:
        if is_inside:
            raise
        has_none = "Unsupported architecture" in str(no_bridge)
        return _plain(live, tokenizer, name, note, NO_ADAPTER if has_none else str(no_bridge))


def check_or_replace(wrapped: "BridgeLM | PlainLM") -> "BridgeLM | PlainLM":
    """Checks a wrapped model, and returns it. If a BridgeLM fails the check, returns a checked PlainLM of the same
    weights instead. Raises: ModelError if that fails too."""
    from cacheprobe.models.checks import check_model

    wrapped.n_ctx = min(wrapped.n_ctx, longrope_length(text_config(wrapped.config)) or wrapped.n_ctx)
    try:
        check_model(wrapped)
        return wrapped
    except ModelError as wrong:
        if not hasattr(wrapped, "bridge"):
            raise
        plain = _plain(wrapped.live, wrapped.tokenizer, wrapped.name, wrapped.weights_note, str(wrong))
        try:
            check_model(plain)
        except ModelError as refusal:
            raise ModelError(f"{wrong}; nor without the bridge: {refusal}") from wrong
        plain.adapter = wrapped.adapter
        return plain


def _plain(live: LiveModule, tokenizer: LiveTokenizer, name: str, note: str, why: str) -> "PlainLM":
    from cacheprobe.models.plain.lm import PlainLM

    try:
        return PlainLM(live, tokenizer, name, note, why)
    except ModelError as refusal:
        raise ModelError(f"{refusal}; nor with a bridge: {why}") from refusal


def _with_operations(model: "BridgeLM | PlainLM", products: str) -> "BridgeLM | PlainLM":
    """Returns a checked model with the operations that `products` of `load_model` says. Raises: ModelError if kernels
    are required and cannot be used."""
    from cacheprobe.models.experts import use_invariant_experts
    from cacheprobe.models.weights import arrange_weights
    from cacheprobe.ops.compiled.operations import choose
    from cacheprobe.ops.kernel_set import choose_kernels

    is_bridge, is_on_gpu = hasattr(model, "bridge"), model.device.type == "cuda"
    if not is_bridge:
        if products == "kernels":
            raise ModelError(f'{model.name} runs without a bridge, so torch computes it; use products="auto"')
        faster = choose(model.dtype, model.device).operations if model.mixtures and products == "auto" else None
        if faster is not None and not is_on_gpu:
            model.mixtures = use_invariant_experts(cast("PlainLM", model).model, faster.product)
        return model
    is_on_one = len({parameter.device for parameter in model.live.parameters()}) == 1
    if products == "kernels":
        chosen = choose_kernels(model.dtype, model.device)
        if chosen.kernels is None or not is_on_one:
            reason = chosen.reason if is_on_one else "the model is on several devices"
            raise ModelError(f'{model.name} cannot run in Triton kernels: {reason}; use products="auto"')
        model.operations = chosen.kernels
    elif products == "auto" and is_on_one:
        by_kernels, by_loops = choose_kernels, choose
        made = by_kernels(model.dtype, model.device) if is_on_gpu else by_loops(model.dtype, model.device)
        model.operations = made[0]
    arrange_weights(model.live, by_output=model.operations is not None)
    model.mixtures = use_invariant_experts(model.live, None if model.operations is None else model.operations.product)
    return model


def model_of_run(
    fingerprint: JsonDict, model: str | None = None, adapter: str | None = None, *, progress: bool = True
) -> CachedLM:
    """Loads the model of a stored run, as its fingerprint says. model, adapter: in place of those that it names.

    Raises: ModelError as load_model, and for weights that are not quantised as the run's were.
    """
    readings = fingerprint.get("readings", "torch")
    loaded = load_model(
        model or fingerprint["model"],
        dtype=fingerprint["dtype"],
        device=fingerprint["device"],
        adapter=adapter or fingerprint.get("adapter"),
        products="torch" if readings == "torch" else "kernels" if readings.startswith("Triton") else "auto",
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


def _refuse_thoughts(options: LoadOptions, what: str) -> None:
    """Raises: ModelError if think_while_decoding is given for `what`, the name of a model without thoughts."""
    if options.get("think_while_decoding") is not None:
        raise ModelError(
            f"{what} is no Thinking States model, so think_while_decoding says nothing of it; leave it out, or load "
            "one such as 'coinflip-thinking'"
        )


def _dtype_name(dtype: object) -> str | None:
    """Returns the name of a dtype, such as "float32"; None for None. Raises: ModelError for an unsupported dtype."""
    name = None if dtype is None else str(dtype).removeprefix("torch.")
    if name is not None and name not in DTYPES:
        raise ModelError(f"unknown dtype {name!r}; choose one of {', '.join(DTYPES)}")
    return name
