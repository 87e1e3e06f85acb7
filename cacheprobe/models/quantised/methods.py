"""Reads which library quantised a folder's weights, before they are loaded, and refuses those that cannot be run."""

import importlib.util
from collections.abc import Mapping
from typing import NamedTuple

from cacheprobe.core.live import LiveConfig, ModelError
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
