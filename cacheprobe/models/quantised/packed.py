"""Reads which library quantised a model's weights, refuses those that cannot be run, and makes packed modules of
bitsandbytes and torchao compute each token by itself.

Packed weights are never read as matrices: their modules are called, and `dense_weight` gives a matrix where one is
needed.
"""

import copy
import importlib
import importlib.util
import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from cacheprobe.core.live import LiveConfig, LiveModule, ModelError
from cacheprobe.core.values import hint

StoredQuantisation = Mapping[str, object]
"""The `quantization_config` of a config.json."""


class Method(NamedTuple):
    """Holds what a way of quantising needs."""

    package: str
    """Package to import; "" if transformers reads the weights by itself."""
    to_install: str
    dequantises: str
    """Class of transformers whose `dequantize=True` makes dense weights while loading; "" if they stay packed."""


METHODS: Mapping[str, Method] = {
    "bitsandbytes": Method("bitsandbytes", "bitsandbytes", ""),
    "torchao": Method("torchao", "torchao", ""),
    "compressed-tensors": Method("compressed_tensors", "compressed-tensors", "CompressedTensorsConfig"),
    "fp8": Method("", "", "FineGrainedFP8Config"),
}
"""`quant_method` of a config -> what it needs."""


def stored_quantisation(config: LiveConfig) -> StoredQuantisation | None:
    """Returns the quantisation that a transformers config names, as a dictionary; None for dense weights."""
    stored: LiveConfig = getattr(config, "quantization_config", None)
    return dict(stored.to_dict() if hasattr(stored, "to_dict") else stored) if stored else None


def method_of(stored: StoredQuantisation) -> str:
    """Returns the name of the method; bitsandbytes for its older configs, which name none."""
    is_old = bool(stored.get("load_in_8bit") or stored.get("load_in_4bit"))
    named = stored.get("quant_method")
    return str(getattr(named, "value", named) or ("bitsandbytes" if is_old else "?"))  # transformers has an enum


def require_method(name: str, stored: StoredQuantisation) -> Method:
    """Returns the Method of a stored quantisation.

    name: of the model.  Raises: ModelError for an unknown method, and for a library that is not installed.
    """
    found = method_of(stored)
    if found not in METHODS:
        known = ("GGUF files", *METHODS)
        raise ModelError(
            f"{name}: its weights are quantised by {found!r}, which is not supported{hint(found, METHODS)}; use "
            f"{', '.join(known)}, or the model that is not quantised"
        )
    method = METHODS[found]
    if method.package and importlib.util.find_spec(method.package) is None:
        raise ModelError(
            f"{name}: its weights are quantised by {found}, which is not installed; pip install {method.to_install}"
        )
    return method


def dequantising(method: Method) -> dict[str, object]:
    """Returns the arguments that make transformers' from_pretrained dequantise the weights; {} if they stay packed."""
    if not method.dequantises:
        return {}
    import inspect

    import transformers

    config_class = getattr(transformers, method.dequantises)
    has_name = "dequantize" in inspect.signature(config_class.__init__).parameters
    return {"quantization_config": config_class(dequantize=True) if has_name else config_class(run_compressed=False)}


def described(stored: StoredQuantisation) -> str:
    """Returns text for results on weights that were dequantised while loading: bits, library, format."""
    method, form, bits, acts = method_of(stored), str(stored.get("format", "")), set[str](), False
    groups = stored.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        bits.add(str((group.get("weights") or {}).get("num_bits", "?")))
        acts = acts or bool(group.get("input_activations"))
    bits = bits or {"8" if method == "fp8" else "?"}
    kind = f"{' and '.join(sorted(bits))}-bit ({' '.join(filter(None, (method, form)))}), dequantised"
    return f"{kind}, activations not rounded" if acts or method == "fp8" else kind


BITS_4, BITS_8, SUBCLASS = "Linear4bit", "Linear8bitLt", "torchao"
"""Kinds of packed modules: two classes of bitsandbytes, and linear layers whose weight is a tensor class of torchao."""
_MARK = "_cacheprobe_dequantised"
"""Key in a live model's `vars` of the text on weights that were dequantised while loading."""


def kind_of(module: nn.Module) -> str:
    """Returns the kind of a module with packed weights; "" for another module."""
    for base in type(module).__mro__:
        if base.__module__.startswith("bitsandbytes.") and base.__name__ in (BITS_4, BITS_8):
            return base.__name__
    return SUBCLASS if isinstance(module, nn.Linear) and _is_packed(module._parameters.get("weight")) else ""


def packed_modules(model: nn.Module) -> dict[str, LiveModule]:
    """Returns the modules of a model whose weights are packed, by their paths."""
    return {path: module for path, module in model.named_modules() if kind_of(module)}


def require_usable(live: LiveModule, name: str) -> str:
    """Prepares the packed modules of a live model, and returns text on its weights for results, such as "4-bit
    (bitsandbytes nf4)"; "" if the model has dense weights.

    Afterwards the modules of bitsandbytes leave their weights as they are on every processor.
    Raises: ModelError for packed weights of another kind or place, for float64, and if the library cannot compute with
    them on this processor.
    """
    packed = packed_modules(live)
    stored = stored_quantisation(getattr(live, "config", None))
    method = "" if stored is None or not getattr(live, "is_quantized", False) else method_of(stored)
    if method == "gguf":
        raise ModelError(
            f"{name}: transformers loaded it from a GGUF file, and may have left out parts of it; give the .gguf "
            "file itself, which is checked"
        )
    if method and not (packed and method in ("bitsandbytes", "torchao")):
        raise ModelError(
            f"{name}: the live model's weights are quantised by {method}, whose modules are not known here; give its "
            "folder, or load it with dequantize=True"
        )
    others = [path for path, module in live.named_modules() if path not in packed and _has_packed(module)]
    if others:
        raise ModelError(f"{name}: {others[0]} has packed weights that are no linear layer's, which are not supported")
    if not packed:
        return str(vars(live).get(_MARK, ""))
    dtypes = {p.dtype for path, p in live.named_parameters() if path.rpartition(".")[0] not in packed}
    if torch.float64 in dtypes:
        raise ModelError(f"{name}: packed weights do not compute in float64; load them in float32")
    for path, module in packed.items():
        _prepare(module, f"{name}: {path}")
    text = " and ".join(sorted({_described(module) for module in packed.values()}))
    path, module = next(iter(packed.items()))
    try:
        with torch.inference_mode():
            some = torch.zeros(1, module.in_features, dtype=next(iter(dtypes)), device=module.weight.device)
            packed_copy(module)(some)
    except Exception as error:  # each library objects in its own way
        raise ModelError(
            f"{name}: {text} does not run on this processor ({type(error).__name__}: {error!s:.120}); use the dtype in "
            "which it was quantised, another quantisation, or the model that is not quantised"
        ) from error
    return text


def convert_dense(live: nn.Module, dtype: torch.dtype) -> None:
    """Converts the parameters of a model with packed weights, except these, to a dtype, which bitsandbytes ignores."""
    packed = {f"{path}.weight" for path in packed_modules(live)}
    for path, parameter in live.named_parameters() if packed else ():
        if path not in packed:
            parameter.data = parameter.data.to(dtype)


def mark_dequantised(live: LiveModule, text: str) -> None:
    """Keeps on a live model the text on its weights, which were dequantised while loading. Replaces the wrappers that
    transformers before 5.23 leaves around dense weights, since they round activations."""
    for path, module in list(live.named_modules()):
        if hasattr(module, "quantization_scheme"):
            dense = nn.Linear(module.in_features, module.out_features, device="meta")
            dense.weight, dense.bias = nn.Parameter(module.weight.detach(), requires_grad=False), module.bias
            live.set_submodule(path, dense)
    live.is_quantized = False
    vars(live.config).pop("quantization_config", None)
    vars(live)[_MARK] = text


def quantised_text(live: nn.Module) -> str:
    """Returns the text on a live model's weights for results; "" if they never were quantised."""
    packed = packed_modules(live)
    return " and ".join(sorted({_described(module) for module in packed.values()})) or str(vars(live).get(_MARK, ""))


def packed_copy(module: LiveModule) -> LiveModule:
    """Returns a copy of a packed module that shares its weights and has no hooks.

    A copy of 4 bits dequantises, then multiplies in the dtype of its input: bitsandbytes would do so in bfloat16 on
    some processors. LLM.int8() chooses by all tokens of a call which inputs are outliers; the copy chooses them for
    each token alone.
    """
    copied = copy.copy(module)
    for name, value in vars(module).items():
        if isinstance(value, dict):
            vars(copied)[name] = type(value)() if isinstance(value, OrderedDict) else dict(value)
    if kind_of(module) == BITS_4:
        vars(copied)["forward"] = partial(_by_dense_weight, copied)
    if kind_of(module) == BITS_8 and module.state.threshold > 0:
        vars(copied)["forward"] = partial(_by_token, partial(type(module).forward, copied), module.state.threshold)
    return copied


def weight_tensors(live: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) of every parameter of a model; of packed weights, the tensors of which they consist."""
    packed = packed_modules(live)
    for name, parameter in live.named_parameters():
        path, _, own = name.rpartition(".")
        if path not in packed or own != "weight":
            yield name, parameter
            continue
        for part, tensor in _parts(packed[path]):
            yield f"{name}.{part}", tensor


def dense_weight(module: LiveModule) -> Tensor:
    """Returns the weight [outputs, inputs] of a linear module, dequantised if it is packed.

    Twin: tests.quantised.twins.dequantised, which reads the file: bitwise, fp4 close(1e-6), as its table has thirds.
    """
    kind, weight = kind_of(module), module.weight.detach()
    if kind == SUBCLASS:
        return weight.dequantize()
    if kind == BITS_8:
        return weight.float() * (_scales_of(module)[:, None] / 127)
    if kind == BITS_4:
        return _of_4_bits(weight.data, module.weight.quant_state)
    return weight


def _prepare(module: LiveModule, name: str) -> None:
    """Makes a module of bitsandbytes leave its weights as they are."""
    kind = kind_of(module)
    if kind == BITS_4:
        state = getattr(module.weight, "quant_state", None)
        if state is None:
            raise ModelError(f"{name} is a Linear4bit without packed weights; load the model with transformers")
        if getattr(state, "packing_format_for_cpu", False):
            raise ModelError(
                f"{name} was run before, and bitsandbytes then rounded its scales to bfloat16; load the model again "
                "and give it before its first forward, or give its folder"
            )
        module.support_avx512bf16_for_cpu = False  # its own forward would round the scales to bfloat16, for good
    elif kind == BITS_8:
        if module.state.has_fp16_weights:
            raise ModelError(f"{name} is a Linear8bitLt with 16-bit weights; load the model with transformers")
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)  # warns at every call


def _of_4_bits(packed: Tensor, state: LiveModule) -> Tensor:
    """Returns a weight [o, i] in float32 from the bytes and the QuantState of bitsandbytes."""
    functional: LiveModule = importlib.import_module("bitsandbytes.functional")
    state = copy.copy(state)
    state.dtype = torch.float32
    if state.shape[1] % state.blocksize == 0:
        return functional.dequantize_4bit(packed, state)
    # bitsandbytes 0.50 takes the scale of another block where a block goes on in the next row (AVX512)
    scales = state.absmax
    if state.nested:
        scales = functional.dequantize_blockwise(scales, state.state2) + state.offset
    whole = packed.view(torch.uint8).flatten().int()
    numbers = state.code[torch.stack((whole >> 4, whole & 15), 1).flatten()]
    return (numbers * scales.repeat_interleave(state.blocksize)[: len(numbers)]).view(state.shape)


def _by_dense_weight(module: LiveModule, values: Tensor) -> Tensor:
    return linear(values, dense_weight(module).to(values.dtype), module.bias)


def _by_token(forward: Callable[[Tensor], Tensor], threshold: float, values: Tensor) -> Tensor:
    """Returns the output [..., o] of LLM.int8() for values [..., i], each token's outliers chosen by itself. Tokens
    without outliers are computed together, since sums of whole numbers are exact."""
    rows = values.reshape(-1, values.shape[-1])
    has_outlier = (rows.half().abs() >= threshold).any(-1)
    if not bool(has_outlier.any()):
        return forward(values)
    out = torch.cat([forward(row[None]) for row in rows[has_outlier]])
    whole = out.new_empty(len(rows), out.shape[-1])
    whole[has_outlier] = out
    if not bool(has_outlier.all()):
        whole[~has_outlier] = forward(rows[~has_outlier])
    return whole.view(*values.shape[:-1], -1)


def _described(module: LiveModule) -> str:
    kind, weight = kind_of(module), module.weight
    if kind == BITS_4:
        return f"4-bit (bitsandbytes {weight.quant_state.quant_type})"
    if kind == BITS_8:
        threshold = module.state.threshold
        outliers = f", outliers from {threshold:g} by token" if threshold > 0 else ""
        return f"8-bit (bitsandbytes LLM.int8, activations too{outliers})"
    name, target = type(weight).__name__, getattr(weight, "target_dtype", None)
    bits = re.search(r"\d+", str(target) if target is not None else name)
    rounds = any(getattr(weight, field, None) for field in ("act_quant_kwargs", "activation_quantization"))
    return f"{bits[0] if bits else '?'}-bit (torchao {name}{', activations too' * rounds})"


def _parts(module: LiveModule) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) of everything that a packed weight consists of."""
    kind, weight = kind_of(module), module.weight
    if kind == SUBCLASS:
        yield from _inner("weight", weight)
        return
    yield "data", weight.data
    if kind == BITS_8:
        yield "scales", _scales_of(module)
        return
    state = weight.quant_state
    for name, tensor in (("absmax", state.absmax), ("code", state.code), ("offset", state.offset)):
        if tensor is not None:
            yield name, tensor
    if state.nested:
        yield from (("absmax.absmax", state.state2.absmax), ("absmax.code", state.state2.code))


def _inner(name: str, tensor: LiveModule) -> Iterator[tuple[str, Tensor]]:
    if not hasattr(tensor, "__tensor_flatten__"):
        yield name, tensor.detach()
        return
    for part in tensor.__tensor_flatten__()[0]:
        yield from _inner(f"{name}.{part}", getattr(tensor, part))


def _scales_of(module: LiveModule) -> Tensor:
    """Returns the largest absolute weight [o] of each output of a Linear8bitLt, which its first forward moves."""
    return module.state.SCB if module.state.SCB is not None else module.weight.SCB


def _is_packed(tensor: Tensor | None) -> bool:
    return tensor is not None and type(tensor).__module__.startswith("torchao.")


def _has_packed(module: nn.Module) -> bool:
    """Returns True if a module itself holds packed weights, in whatever place."""
    is_theirs = any(base.__module__.startswith("bitsandbytes.nn") for base in type(module).__mro__)
    has_whole = any(
        not p.is_floating_point() and not p.is_complex() for p in module._parameters.values() if p is not None
    )
    return is_theirs or has_whole or any(_is_packed(p) for p in module._parameters.values())
