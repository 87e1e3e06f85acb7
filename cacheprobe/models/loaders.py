"""Loads a CachedLM from a name, a directory, a live transformers model, or a TransformerBridge.

Each transformers model is tested with a short text before it is returned. A model that our KVCache does not support
raises ModelError with the reason.
"""

import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack, cast

from cacheprobe.core.config import AUTO, DTYPES
from cacheprobe.core.live import LiveModule, LiveTokenizer, without_collection
from cacheprobe.core.other_names import dtype_name
from cacheprobe.core.terminal import announcing
from cacheprobe.core.values import JsonDict, require_known_options
from cacheprobe.models.base import CachedLM, ModelError
from cacheprobe.models.known import require_known, shipped_folder
from cacheprobe.models.plain.files import (
    Device,
    DeviceMap,
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
    from cacheprobe.ops.compiled.operations import CompiledOperations
    from cacheprobe.ops.kernel_set import KernelSet

PRODUCTS = ("auto", "torch", "kernels")
"""Values of `products` of `load_model`."""


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
@without_collection()
def load_model(
    model: "str | Path | LiveModule" = "smollm2-135m",
    tokenizer: LiveTokenizer = None,
    **options: Unpack[LoadOptions],
) -> CachedLM:
    """Loads and checks a model, and returns it as a CachedLM, ready for `cp.run`.

    model: "smollm2-135m", a shipped Thinking States model such as "coinflip-thinking", a Hugging Face hub name, a local
    directory, a .gguf file, a live transformers model (its weights are shared, and its PyTorch hooks act), a
    TransformerBridge, whose own hooks act, or a live ThinkingModel, such as a ThinkingPretrained.
    tokenizer: for a live model; without one, prompts must be lists of token ids. It is used as it is, and not changed:
    `model.encode(text)` gives `tokenizer(text).input_ids`. Of a TransformerBridge, the tokenizer as its files configure
    it, without the start token that TransformerLens adds.
    dtype: "float32", "bfloat16", "float16" or "float64" (or torch's, or a short name such as "bf16"). Default: "auto",
    the dtype of the model's files, as transformers takes it; float32 for a .gguf file and with an adapter. A live model
    or a bridge keeps its own dtype; another dtype is refused. In float64 no state is rounded to float32, even where the
    libraries would do so: use it to measure the error of the other dtypes.
    device: "cpu", "cuda" or "cuda:1", for a name or directory; a live model or a bridge stays on its device.
    device_map: instead of device, the device of each part of the model, as transformers takes it: a dict or "auto".
    adapter: a LoRA adapter for a name or directory: "coin-flip", or a directory that peft wrote. The adapter is merged
    into the float32 weights, which are then converted to `dtype`; `weights_note` records this.
    products: "auto" (default) computes matrix products and readings in the loops that numba compiles for this
    processor, where they are faster than torch's (`cacheprobe doctor` says where), and on a GPU in Triton kernels: in
    each that passes a trial, and else by torch, with a warning; "torch" does neither. "kernels" requires the kernels,
    also in Triton's interpreter on a CPU (TRITON_INTERPRET=1), for tests. Results have other bits; the model's repr and
    the fingerprint record the choice. Thinking States models use torch's.
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
    if not is_named and dtype not in (AUTO, own_dtype):
        raise ModelError(f"{loaded.name} is in {own_dtype}, not {dtype}; convert it with .to(torch.{dtype}) first")
    if (think := options.get("think_while_decoding")) is not None:
        cast("ThinkingLM", loaded).set_think_while_decoding(think)
    prepend_bos = bool(options.get("prepend_bos"))
    if prepend_bos and getattr(loaded.tokenizer, "bos_token_id", None) is None:
        raise ModelError(f"{loaded.name} has no tokenizer with a start token (bos_token); leave out prepend_bos")
    loaded.prepend_bos = prepend_bos
    return loaded


def _named(
    model: "str | Path",
    tokenizer: LiveTokenizer,
    dtype: str,
    device_map: "DeviceMap | None",
    options: LoadOptions,
) -> CachedLM:
    """Returns the model of a name or directory, with the adapter merged."""
    import torch

    name, adapter = str(model), options.get("adapter")
    if not name.strip():
        raise ModelError("the model's name is empty; give a name, a directory or a model")
    own_dtype = torch.float32 if dtype == AUTO else getattr(torch, dtype)
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
        dtype if adapter is None else "float32",
        tokenizer,
        device_map=device_map if adapter is None else None,  # an adapter is merged on the CPU
        trust_remote_code=options.get("trust_remote_code") is True,
        progress=options.get("progress", True),
    )
    products = options.get("products", "auto")
    if adapter is None:
        return wrap_live(live, tokenizer, name, note, products, options.get("progress", True))
    if packed_modules(live):
        raise ModelError(f"{model}: an adapter is merged into dense weights, and these are packed; give a dense model")
    from cacheprobe.models.hf.adapters import adapter_directory, merge_adapter

    merged = merge_adapter(live, name, adapter_directory(adapter, name))
    live = live.to(own_dtype)
    if isinstance(device_map, Mapping):
        live = live.to(device_map[""])
    note = "; ".join(filter(None, (note, merged)))
    wrapped = wrap_live(live, tokenizer, name, note, products, options.get("progress", True))
    wrapped.adapter = str(adapter)
    return wrapped


def _live(model: LiveModule, tokenizer: LiveTokenizer, options: LoadOptions) -> CachedLM:
    """Returns a CachedLM around a live model of transformers, TransformerLens or cacheprobe."""
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
        from cacheprobe.models.hf.bridge import tokenizer_of_owner
        from cacheprobe.models.hf.shared import remember_bridge, require_dense

        require_dense(model.original_model, name)
        remember_bridge(model.original_model, model)
        model, tokenizer = model.original_model, tokenizer_of_owner(model) if tokenizer is None else tokenizer
    if not (hasattr(model, "config") and hasattr(model, "forward")):
        raise ModelError(f"cannot load a {kind}; give a name, a directory, a transformers model or a bridge")
    refuse_unknown_memory(model.config, type(model).__name__)
    return wrap_live(model, tokenizer, name, "", options.get("products", "auto"), options.get("progress", True))


def wrap_live(
    live: LiveModule, tokenizer: LiveTokenizer, name: str, note: str, products: str, progress: bool = True
) -> "BridgeLM | PlainLM":
    """Returns a checked PlainLM around a live transformers model, with the operations that `products` of `load_model`
    says; if it refuses the model, such as one whose modules are not those of its class, a checked BridgeLM.

    Warns if less than all kernels compute on a GPU, and of a bridge there. Raises: ModelError with both reasons if
    neither runs the model; if kernels are required and cannot be used; for packed weights that cannot be run.
    """
    from cacheprobe.models.checks import check_model
    from cacheprobe.models.hf.shared import bridge_around, require_no_other_bridge, sharing_copy
    from cacheprobe.models.plain.bridged import bridge_of
    from cacheprobe.models.plain.lm import PlainLM
    from cacheprobe.models.weights import arrange_weights
    from cacheprobe.ops.compiled.operations import choose_readout

    require_no_other_bridge(live, name)
    text = require_usable(live, name)
    note = note if text in note else "; ".join(filter(None, (note, text)))
    try:
        plain = PlainLM(live, tokenizer, name, note)
        with announcing("compiling loops, once for this processor and these versions", progress, after=3.0):
            faster, reason = _operations(plain, products)
        arrange_weights(live, by_output=faster is not None)
        plain.use_operations(faster)
        if faster is None and products == "auto":
            plain.logits_readout = choose_readout(plain.dtype, plain.device)
        check_model(plain)
        _warn_on_gpu(plain, reason)
        return plain
    except ModelError as refusal:
        if products == "kernels" or packed_modules(live):
            raise
        try:
            if bridge_around(live) is None:
                check_model(bridge_of(sharing_copy(live), tokenizer, name, note))  # what is refused stays unwrapped
            bridged = bridge_of(live, tokenizer, name, note)
            bridged.operations = _operations(bridged, products)[0]
            check_model(bridged)
        except ModelError as no_bridge:
            raise ModelError(f"{refusal}; nor with a bridge: {no_bridge}") from refusal
        _warn_on_gpu(bridged, f"runs on its bridge, whose blocks torch computes: {refusal}")
        return bridged


def _operations(model: "BridgeLM | PlainLM", products: str) -> "tuple[CompiledOperations | KernelSet | None, str]":
    """Returns (the operations with which a model computes, as `products` of `load_model` says, None for torch's; text
    that says which operations torch computes on a GPU because their kernel cannot run, and why). Raises: ModelError if
    kernels are required and cannot be used."""
    from cacheprobe.ops.compiled.operations import choose
    from cacheprobe.ops.kernel_set import DTYPES, choose_kernels

    is_on_one = len({parameter.device for parameter in model.live.parameters()}) == 1
    is_dense = not packed_modules(model.live)
    if products == "torch" or (products == "auto" and not (is_on_one and is_dense)):
        return None, ""
    if products == "auto" and model.device.type != "cuda":
        return choose(model.dtype, model.device).operations, ""
    kernels, reason = choose_kernels(model.dtype, model.device)
    if products == "auto":
        if model.dtype not in DTYPES or (kernels is not None and not kernels.by_torch):
            return kernels, ""
        return kernels, f"torch computes these operations, because their kernels cannot run: {reason}"
    reason = reason if is_on_one else "the model is on several devices"
    reason = reason if is_dense else "its weights are packed"
    if kernels is None or kernels.by_torch or not (is_on_one and is_dense):
        raise ModelError(f'{model.name} cannot run in Triton kernels: {reason}; use products="auto"')
    return kernels, ""


def _warn_on_gpu(model: "BridgeLM | PlainLM", reason: str) -> None:
    """Warns, in one line, that a model on a GPU computes by torch, or on its bridge. reason: "" for no warning."""
    if reason and model.device.type == "cuda":
        warnings.warn(f"{model.name} on {model.device}: {reason}", RuntimeWarning, stacklevel=4)


def model_of_run(
    fingerprint: JsonDict, model: str | None = None, adapter: str | None = None, *, progress: bool = True
) -> CachedLM:
    """Loads the model of a stored run, as its fingerprint says. model, adapter: in place of those that it names.

    Raises: ModelError as load_model, and for weights that are not quantised as the run's were.
    """
    readings = fingerprint.get("readings", "torch")
    is_in_kernels = readings.startswith("Triton") and "by torch" not in readings
    loaded = load_model(
        model or fingerprint["model"],
        dtype=fingerprint["dtype"],
        device=fingerprint["device"],
        adapter=adapter or fingerprint.get("adapter"),
        products="torch" if readings == "torch" else "kernels" if is_in_kernels else "auto",
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


def _dtype_name(dtype: object) -> str:
    """Returns the name of a dtype, such as "float32"; "auto" for None. Raises: ModelError for an unsupported dtype."""
    name = AUTO if dtype is None else dtype_name(dtype)
    if name not in (AUTO, *DTYPES):
        raise ModelError(f"unknown dtype {name!r}; choose one of {', '.join((AUTO, *DTYPES))}")
    return name
