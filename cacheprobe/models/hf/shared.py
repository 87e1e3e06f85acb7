"""Rebuilds the plain Hugging Face model that is inside a TransformerBridge, with the same tensors.

The bridge wraps a model in place: each component replaces an HF module and keeps it as a child. Walking both module
trees together finds the wrapped module for every module of a fresh model without weights.
"""

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from cacheprobe.core.live import LiveConfig, LiveModule
from cacheprobe.models.base import ModelError
from cacheprobe.models.experts import forward_of
from cacheprobe.models.hf.attention import ATTENTION
from cacheprobe.models.quantised.packed import packed_copy, packed_modules

WRAPPED = "_original_component"
"""The name under which a bridge component keeps the HF module that it replaced."""

_TENSORS = ("_parameters", "_buffers")


def empty_model(wrapped: nn.Module) -> nn.Module:
    """Returns a transformers model of the class of `wrapped`, with a copy of its config, on the "meta" device (tensors
    without memory). The model's attention is cacheprobe's if the class supports that, otherwise torch's fused
    attention, otherwise eager. Modules of bitsandbytes are copied, with the weights that they share.

    Raises: ModelError if the class cannot be built from its config.
    """
    kind: LiveModule = type(wrapped)
    has_table = hasattr(kind, "_supports_attention_backend") and kind._supports_attention_backend
    try:
        config: LiveConfig = copy.deepcopy(wrapped.config)
        config.output_attentions = config.output_hidden_states = False  # set by some bridges; fused attention has none
        with torch.device("meta"):
            try:
                config._attn_implementation = ATTENTION if has_table else "sdpa"
                plain = kind(config)
            except (ValueError, ImportError):  # not with this architecture's attention
                config._attn_implementation = "eager"
                plain = kind(config)
    except Exception as error:
        raise ModelError(f"{kind.__name__} cannot be built from its config: {error!s:.120}") from error
    for path, module in packed_modules(wrapped).items():
        if type(module) is not type(plain.get_submodule(path)):
            plain.set_submodule(path, packed_copy(module))
    return plain.eval()


class SharedWeights:
    """Makes two copies of a transformers model share all tensors: `wrapped`, whose modules a TransformerBridge may have
    replaced, and `plain`, a model of the same transformers class as it was."""

    def __init__(self, wrapped: nn.Module, plain: nn.Module) -> None:
        """Calls `bind`, which puts the tensors of `wrapped` into `plain`. Raises: ModelError if the two models differ
        in more than the bridge's wrappers."""
        self.wrapped, self.plain = wrapped, plain
        self._taken: list[tuple[dict[str, Tensor | None], str, Tensor]] = []
        """(a wrapped module's dictionary, name, the tensor found there)"""
        self._path_of: dict[int, str] = {}
        self.bind()

    def bind(self) -> None:
        """Puts the wrapped model's current parameters, buffers and tensor attributes into the plain model. Call `bind`
        again if `is_current` is False. Raises: ModelError if the two models differ in more than the bridge's
        wrappers."""
        self._taken.clear()
        self._path_of.clear()
        for path, source, target in _pairs(self.wrapped, self.plain):
            self._path_of[id(source)] = path
            self._taken += _take_tensors(source, target, path)
            # a tensor that is not on the "meta" device was made by a forward, such as LongRoPE's frequencies
            plain_tensors = [
                name
                for name, value in vars(target).items()
                if isinstance(value, Tensor) and (value.is_meta or name in vars(source))
            ]
            if lacking := sorted(set(plain_tensors) - set(vars(source))):
                raise ModelError(f"{path or 'the model'} lacks a tensor of its class: {lacking[0]}")
            vars(target).update({name: vars(source)[name] for name in plain_tensors})

    @property
    def is_current(self) -> bool:
        """True if the wrapped modules still have the same parameter and buffer objects as at the last `bind`."""
        return all(tensors.get(name) is tensor for tensors, name, tensor in self._taken)

    def path_of(self, original: nn.Module | None) -> str | None:
        """Returns the dotted path, inside the plain model, of the module that corresponds to the wrapped module
        `original`; None for an unknown module."""
        return self._path_of.get(id(original))

    def kept_apart(self) -> list[str]:
        """Returns the names of the bridge's parameters that share no memory with the parameters of the model inside the
        bridge.

        GPT-NeoX: the bridge splits the joint projection of q, k and v into copies, so an edit of one does not reach the
        other.
        """
        shared = {tensor.untyped_storage().data_ptr() for _, _, tensor in self._taken}
        named = self.wrapped.named_parameters()
        return [plain_path(name) for name, weight in named if weight.untyped_storage().data_ptr() not in shared]


def plain_path(name: str) -> str:
    """Returns the dotted name of a module without the parts "_original_component" that the bridge's wrappers add."""
    return ".".join(part for part in name.split(".") if part != WRAPPED)


def _take_tensors(
    source: nn.Module, target: nn.Module, path: str
) -> list[tuple[dict[str, Tensor | None], str, Tensor]]:
    """Puts the parameters and buffers of module `source` into module `target`, without copying. Returns a list of
    (dictionary of `source`, name, tensor)."""
    source_tensors = [
        (vars(source)[kind], name, tensor)
        for kind in _TENSORS
        for name, tensor in vars(source)[kind].items()
        if tensor is not None
    ]
    own = {name: tensor for kind in _TENSORS for name, tensor in vars(target)[kind].items()}
    names = {name for _, name, _ in source_tensors}
    needed = {name for name, tensor in own.items() if tensor is not None}
    if not needed <= names <= set(own):  # a layer's optional bias is None, and the bridge may fill it with zeros
        raise ModelError(f"{path or 'the model'} holds {sorted(names)}, its class {sorted(needed)}")
    for kind in _TENSORS:
        absent = {name: None for name in vars(target)[kind] if name not in names}
        taken = {name: tensor for dictionary, name, tensor in source_tensors if dictionary is vars(source)[kind]}
        vars(target)[kind].clear()
        vars(target)[kind].update({**taken, **absent})
    return source_tensors


def _pairs(source: LiveModule, target: LiveModule, path: str = "") -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Yields (path, wrapped module, plain module) for the modules of a wrapped model and its plain copy."""
    while WRAPPED in source._modules:
        source = source._modules[WRAPPED]
    if type(source) is not type(target):
        raise ModelError(f"{path or 'the model'} is a {type(source).__name__}, not a {type(target).__name__}")
    if "forward" in vars(source) and forward_of(source) is None:
        raise ModelError(f"the forward of {path or 'the model'} was replaced")
    names = [{name for name, child in module._modules.items() if child is not None} for module in (source, target)]
    if names[0] != names[1]:
        odd = sorted(names[0] ^ names[1])
        raise ModelError(f"{path or 'the model'} and its class differ in their parts: {', '.join(odd)}")
    yield path, source, target
    for name in target._modules:
        if name in names[1]:
            yield from _pairs(source._modules[name], target._modules[name], f"{path}.{name}" if path else name)
