"""Makes copies of a transformers model that share its tensors, also of one inside a user's TransformerBridge.

A bridge wraps a model in place: each component replaces an HF module and keeps it as a child. Walking both module
trees together finds the wrapped module for every module of a fresh model without weights.
"""

import copy
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from cacheprobe.core.live import LiveConfig, LiveModule, ModuleValue
from cacheprobe.models.base import ModelError
from cacheprobe.models.experts import forward_of
from cacheprobe.models.hf.attention import ATTENTION
from cacheprobe.models.quantised.packed import packed_copy, packed_modules
from cacheprobe.models.weights import WRAPPED, plain_path

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

    def __init__(self, wrapped: LiveModule, plain: nn.Module) -> None:
        """Calls `bind`, which puts the tensors of `wrapped` into `plain`. Raises: ModelError if the two models differ
        in more than the bridge's wrappers."""
        self.wrapped, self.plain = wrapped, plain
        self._mirrored: list[tuple[dict[int, object], int]] = []
        """(a plain module's dictionary of hooks, key of a hook that is the user's)"""
        self.bind()

    def bind(self) -> None:
        """Puts the wrapped model's current parameters, buffers and tensor attributes into the plain model. Call `bind`
        again if `is_current` is False. Raises: ModelError, before anything is changed, if the two models differ in more
        than the bridge's wrappers."""
        pairs = list(_pairs(self.wrapped, self.plain))
        found = [_tensors_of(source, target, path) for path, source, target in pairs]
        self.taken = [one for taken, _ in found for one in taken]
        """(a wrapped module's dictionary, name, the tensor found there)"""
        for (_, _, target), (_, attributes) in zip(pairs, found, strict=True):
            vars(target).update(attributes)
        for _, source, target in pairs:
            if (device := device_of(source)) is not None and not target._forward_pre_hooks:
                target.register_forward_pre_hook(partial(_on_device, device), with_kwargs=True)
        self._pairs, self._structure = pairs, self._present_structure()

    def _present_structure(self) -> tuple[object, ...]:
        """Returns what shows a replaced module, a replaced forward or a changed config of the wrapped model."""
        modules = [(id(module), id(vars(module).get("forward"))) for module in self.wrapped.modules()]
        config = self.wrapped.config.to_dict()
        return modules, str({name: value for name, value in config.items() if name not in _HARMLESS})

    @property
    def is_current(self) -> bool:
        """True if the wrapped modules still have the same parameter and buffer objects as at the last `bind`."""
        return all(tensors.get(name) is tensor for tensors, name, tensor in self.taken)

    def follow(self, name: str) -> None:
        """Calls `bind` again if tensors or modules were replaced. name: of the model, for errors. Raises: ModelError if
        a module has another class now, or if the config was changed."""
        structure = self._present_structure()
        if structure[1] != self._structure[1]:
            raise ModelError(f"{name}: its config was changed after it was loaded; load the changed model again")
        if structure != self._structure or not self.is_current:
            try:
                self.bind()
            except ModelError as refusal:
                raise ModelError(f"{name}: {refusal}; load the changed model again") from refusal

    def mirror_hooks(self) -> str:
        """Gives the plain modules the PyTorch hooks that the user has on the wrapped ones now, in place of those given
        before. Returns text such as "a PyTorch hook on lm_head"; "" if there is none."""
        for hooks, key in self._mirrored:
            hooks.pop(key, None)
        self._mirrored, found = [], ""
        for path, source, target in self._pairs:
            for kind, flags in _HOOKS.items():
                for key, hook in vars(source)[kind].items():
                    if not _is_of(hook, "transformer_lens", "transformers"):
                        given = [(vars(target)[kind], hook)]
                        given += [(vars(target)[flag], True) for flag in flags if key in vars(source)[flag]]
                        for hooks, value in given:
                            hooks[key] = value
                            self._mirrored.append((hooks, key))
                        found = found or f"a PyTorch hook on {path or 'the model'}"
        return found

    def apart(self, original: nn.Module) -> list[tuple[str, Tensor]]:
        """Returns the parameters and buffers, by name, of a bridge's transformers model that share no memory with the
        plain model. GPT-NeoX: the bridge splits the joint projection of q, k and v into copies."""
        shared = {tensor.untyped_storage().data_ptr() for _, _, tensor in self.taken}
        named = (*original.named_parameters(), *original.named_buffers())
        return [(plain_path(n), tensor) for n, tensor in named if tensor.untyped_storage().data_ptr() not in shared]


_HARMLESS = ("pad_token_id", "bos_token_id", "eos_token_id", "use_cache", "output_attentions", "output_hidden_states")
"""Fields of a config that change no number of a pass."""

_HOOKS = {
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
}
"""A module's dictionary of hooks -> its dictionaries that say how a hook is called."""


def sharing_copy(live: nn.Module) -> LiveModule:
    """Returns a copy of a transformers model that shares its parameters and buffers, without the user's PyTorch
    hooks."""
    copied = copy.deepcopy(live, {id(tensor): tensor for tensor in (*live.parameters(), *live.buffers())})
    for module in copied.modules():
        for kind in _HOOKS:
            kept = ((key, hook) for key, hook in vars(module)[kind].items() if _is_of(hook, "transformers"))
            vars(module)[kind] = OrderedDict(kept)
    return copied


def _tensors_of(
    source: nn.Module, target: nn.Module, path: str
) -> tuple[list[tuple[dict[str, Tensor | None], str, Tensor]], dict[str, object]]:
    """Returns ((dictionary of `source`, name, tensor) of its parameters and buffers; attributes with which `target`
    shares them). Raises: ModelError if module `source` holds others than its class."""
    found = [(vars(source)[kind], name) for kind in _TENSORS for name in vars(source)[kind]]
    taken = [(held, name, held[name]) for held, name in found if held[name] is not None]
    own = {name: tensor for kind in _TENSORS for name, tensor in vars(target)[kind].items()}
    names, needed = {name for _, name, _ in taken}, {name for name, tensor in own.items() if tensor is not None}
    if not needed <= names <= set(own):  # a layer's optional bias is None, and the bridge may fill it with zeros
        raise ModelError(f"{path or 'the model'} holds {sorted(names)}, its class {sorted(needed)}")
    attributes: dict[str, object] = {}
    for kind in _TENSORS:
        here = {name: tensor for held, name, tensor in taken if held is vars(source)[kind]}
        attributes[kind] = {**here, **{name: None for name in vars(target)[kind] if name not in names}}
    # a tensor that is not on the "meta" device was made by a forward, such as LongRoPE's frequencies
    for name, value in vars(target).items():
        if isinstance(value, Tensor) and (value.is_meta or name in vars(source)):
            if name not in vars(source):
                raise ModelError(f"{path or 'the model'} lacks a tensor of its class: {name}")
            attributes[name] = vars(source)[name]
    return taken, attributes


_BRIDGE = "_cacheprobe_bridge"
"""Key in a live model's `vars` under which the bridge around it is kept: no attribute, which would become a
submodule."""


def bridge_around(live: nn.Module) -> LiveModule | None:
    """Returns the bridge around a transformers model that `remember_bridge` was told of; None without one."""
    return vars(live).get(_BRIDGE)


def remember_bridge(live: nn.Module, bridge: nn.Module) -> None:
    """Notes the bridge around a transformers model."""
    vars(live)[_BRIDGE] = bridge


def require_dense(live: nn.Module, name: str) -> None:
    """Raises: ModelError for a transformers model with packed weights, which no bridge can read."""
    if packed := packed_modules(live):
        raise ModelError(
            f"{name}: the weights of {next(iter(packed))} are packed, and a bridge reads weights as matrices; give the "
            "transformers model itself, before a bridge is around it"
        )


def require_no_other_bridge(live: nn.Module, name: str) -> None:
    """Raises: ModelError for a transformers model inside a bridge that `remember_bridge` was not told of."""
    if bridge_around(live) is None and any(type(m).__module__.startswith("transformer_lens") for m in live.modules()):
        raise ModelError(f"{name}: the {type(live).__name__} is already inside a TransformerBridge; give the bridge")


def device_of(module: nn.Module) -> torch.device | None:
    """Returns the device to which accelerate moves what a module is given; None for a module that it left alone, or
    whose weights it keeps elsewhere."""
    hook: LiveModule = vars(module).get("_hf_hook")
    if type(hook).__name__ != "AlignDevicesHook" or hook.offload or hook.execution_device is None:
        return None
    device = hook.execution_device
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def _on_device(
    device: torch.device, module: nn.Module, args: tuple[ModuleValue, ...], kwargs: dict[str, ModuleValue]
) -> tuple[tuple[ModuleValue, ...], dict[str, ModuleValue]]:
    """Moves the tensors that a module is given to its device."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), (args, kwargs))


def _pairs(source: LiveModule, target: LiveModule, path: str = "") -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Yields (path, wrapped module, plain module) for the modules of a wrapped model and its plain copy."""
    while WRAPPED in source._modules:
        source = source._modules[WRAPPED]
    if type(source) is not type(target):
        raise ModelError(f"{path or 'the model'} is a {type(source).__name__}, not a {type(target).__name__}")
    if "forward" in vars(source) and forward_of(source) is None and device_of(source) is None:
        raise ModelError(f"the forward of {path or 'the model'} was replaced")
    names = [{name for name, child in module._modules.items() if child is not None} for module in (source, target)]
    if names[0] != names[1]:
        odd = sorted(names[0] ^ names[1])
        raise ModelError(f"{path or 'the model'} and its class differ in their parts: {', '.join(odd)}")
    yield path, source, target
    for name in target._modules:
        if name in names[1]:
            yield from _pairs(source._modules[name], target._modules[name], f"{path}.{name}" if path else name)


def user_hooks(live: LiveModule) -> Iterator[str]:
    """Yields text, such as "a hook on blocks.0.hook_attn_out", for each hook that the user set on a transformers model:
    at a HookPoint of the bridge around it, or as a PyTorch forward hook on a module. Permanent hooks of TransformerLens
    and cacheprobe, and PyTorch hooks of TransformerLens and transformers, are left out."""
    modules, bridge = list(live.named_modules()), bridge_around(live)
    points = {plain_path(name): module for name, module in modules if "fwd_hooks" in vars(module)}
    if bridge is not None:
        points = bridge.hook_dict | points
    for name, point in points.items():
        for handle in (*point.fwd_hooks, *point.bwd_hooks):
            if not (handle.is_permanent and _is_of(handle.user_hook, "transformer_lens", "cacheprobe")):
                yield f"a hook on {name}"
    for name, module in modules:
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            if not _is_of(hook, "transformer_lens", "transformers"):  # HookPoints' own, and recorders
                yield f"a PyTorch hook on {plain_path(name) or 'the model'}"


def _is_of(function: object, *libraries: str) -> bool:
    home = getattr(getattr(function, "func", function), "__module__", None) or ""
    return home.split(".")[0] in libraries
