"""Watches one short forward of a transformers model: which modules ran, in which order, on which values; and finds the
steps from the last residual stream to the logits."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from cacheprobe.core.hook_names import RECURRENT
from cacheprobe.core.live import LiveConfig, LiveModule, ModuleValue
from cacheprobe.kvcache.recurrent import LayerStates, StateKey
from cacheprobe.models.base import ModelError
from cacheprobe.models.hf.cache import ShapeProbe
from cacheprobe.models.hf.lm import Head
from cacheprobe.models.plain.own_states import OwnStates, own_states
from cacheprobe.models.plain.recurrence import CONV
from cacheprobe.models.settings import keeping_float64

PROBE_LENGTH = 7
"""Tokens of the watched forward."""


@dataclass(frozen=True, eq=False)
class Call:
    """Holds one call of a module: its first input and output tensors, and when it began and ended."""

    path: str
    module: nn.Module
    value_in: Tensor | None
    value_out: Tensor | None
    began: int
    ended: int


@dataclass(eq=False)
class Watched:
    """Holds what one short forward showed."""

    calls: list[Call] = field(default_factory=list)
    writers: dict[int, list[str]] = field(default_factory=dict)
    """Cache layer -> paths of the modules that were running when keys and values were written, outermost first."""
    keepers: dict[int, list[str]] = field(default_factory=dict)
    """Cache layer -> paths of the modules that were running at every write of a recurrent state, outermost first."""
    wrote_at: dict[int, int] = field(default_factory=dict)
    """Cache layer -> time of the first write, on the clock of `Call`."""
    written: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Cache layer -> keys and values [1, h, t, d] that were written."""
    initial: dict[int, LayerStates] = field(default_factory=dict)
    """Recurrent layer -> its states before the first token."""
    keys_of: dict[int, dict[str, tuple[StateKey, ...]]] = field(default_factory=dict)
    """Recurrent layer -> path of each module that keeps states -> these states."""
    sources: dict[int, int] = field(default_factory=dict)
    """Layer without keys and values of its own -> the layer whose keys and values it reads."""
    probe: ShapeProbe = field(default_factory=ShapeProbe)
    logits: Tensor = field(default_factory=lambda: torch.zeros(0))


class _WritingProbe(ShapeProbe):
    """Records which modules were running when each layer wrote keys and values."""

    def __init__(self, watcher: "_Watcher") -> None:
        super().__init__()
        self._watcher = watcher

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Records the layer's shape, device and running modules; returns the given keys and values unchanged.
        Raises: ModelError if a layer writes twice."""
        watcher = self._watcher
        if layer_idx in watcher.watched.writers:
            raise ModelError(f"layer {layer_idx} writes keys and values more than once in a forward")
        watcher.watched.writers[layer_idx] = watcher.running_paths
        watcher.watched.wrote_at.setdefault(layer_idx, watcher.tick())
        watcher.watched.written[layer_idx] = key_states.to(watcher.device), value_states.to(watcher.device)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Returns None: no token came before."""

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Returns None: no token came before."""

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Returns False: no token came before."""
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        """Returns False: one forward has no past."""
        return False

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: object,
    ) -> Tensor:
        """Records the shape of a convolution state. Returns the inputs [b, m, t], with zeros before them if they are
        fewer than `conv_kernel_size`."""
        width = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
        full = torch.nn.functional.pad(conv_states, (max(0, width - conv_states.shape[-1]), 0))
        self._note(layer_idx, (CONV, state_idx), full[..., -width:])
        return full

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: object
    ) -> Tensor:
        """Records the shape of a recurrent state, and returns it."""
        self._note(layer_idx, (RECURRENT, state_idx), recurrent_states)
        return recurrent_states

    def _note(self, layer: int, key: tuple[str, int], state: Tensor) -> None:
        """Keeps zeros [...] of the shape of a state [1, ...], and the modules that run at every write of the layer."""
        watcher, watched = self._watcher, self._watcher.watched
        running, initial = watcher.running_paths, watched.initial.get(layer)
        if initial is None:
            watched.wrote_at.setdefault(layer, watcher.tick())
            initial = {}
            self.layer_shapes.setdefault(layer, (0, 0, 0))
            self.devices.setdefault(layer, state.device)
        if key in initial:
            raise ModelError(f"layer {layer} writes its {key[0]} state more than once in a forward")
        watched.initial[layer] = {**initial, key: torch.zeros_like(state[0])}
        watched.keepers[layer] = _common_start(watched.keepers.get(layer, running), running)


class _Watcher:
    """Keeps the clock, the running modules and the finished calls of one forward."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.watched, self.device = Watched(), device
        self.watched.probe = _WritingProbe(self)
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.running: list[nn.Module] = []
        self._began: list[tuple[int, Tensor | None]] = []
        self._now = 0

    @property
    def running_paths(self) -> list[str]:
        """Paths of the running modules, outermost first."""
        return [self.paths[id(module)] for module in self.running]

    def tick(self) -> int:
        """Returns the time, which grows by one with every call."""
        self._now += 1
        return self._now

    def enter(self, module: nn.Module, args: tuple[ModuleValue, ...], kwargs: dict[str, ModuleValue]) -> None:
        """Notes that a module begins."""
        self.running.append(module)
        self._began.append((self.tick(), self._first_tensor((*args, *kwargs.values()))))

    def leave(self, module: nn.Module, args: tuple[ModuleValue, ...], output: ModuleValue) -> None:
        """Notes that a module has ended, with copies of its first input and output."""
        self.running.pop()
        began, value = self._began.pop()
        value_out = self._first_tensor(output if isinstance(output, tuple) else (output,))
        path = self.paths[id(module)]
        self.watched.calls.append(Call(path, module, value, value_out, began, self.tick()))

    def _first_tensor(self, values: tuple[ModuleValue, ...]) -> Tensor | None:
        """Returns a copy of the first tensor of floats among `values`, on one device, where copies of all are compared;
        None if there is none."""
        found = next((one for one in values if isinstance(one, Tensor)), None)
        is_number = found is not None and found.is_floating_point()
        return found.detach().to(self.device, copy=True) if found is not None and is_number else None


def _common_start(one: Sequence[str], other: Sequence[str]) -> list[str]:
    """Returns the items with which both lists begin."""
    different = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return list(one[:different])


def cache_argument(model: LiveModule, cache: Cache) -> dict[str, object]:
    """Returns the cache as a named argument of a model's forward."""
    if (own := own_states(model.config)) is not None:
        return {own.argument: own.argument_of(cache)}
    names = inspect.signature(type(model).forward).parameters
    return {"cache_params" if "cache_params" in names else "past_key_values": cache}


def _note_own_states(watched: Watched, own: OwnStates) -> None:
    """Notes the states of a family that keeps them in an object of its own. A module with a recurrent state begins a
    layer; one with other states belongs to the layer of the module before."""
    layer = -1
    for call in sorted(watched.calls, key=lambda one: one.began):
        states = own.initial(call.module, call.value_in) if call.value_in is not None else {}
        if (RECURRENT, 0) in states and call.value_in is not None:
            layer += 1
            around = [one for one in watched.calls if one.began <= call.began and one.ended >= call.ended]
            watched.keepers[layer] = [one.path for one in sorted(around, key=lambda one: one.began)]
            watched.wrote_at[layer] = call.began
            watched.probe.layer_shapes[layer], watched.probe.devices[layer] = (0, 0, 0), call.value_in.device
        if states:
            watched.initial[layer] = {**watched.initial.get(layer, {}), **states}
            watched.keys_of.setdefault(layer, {})[call.path] = tuple(states)


def watch(model: LiveModule, device: torch.device, dtype: torch.dtype, num_tokens: int) -> Watched:
    """Runs one forward over a few tokens without a stored cache, and returns what it showed.

    num_tokens: size of the vocabulary, from which the tokens are taken.
    Raises: ModelError if a layer writes keys and values twice, or a logit is not finite; whatever the model raises.
    """
    watcher = _Watcher(model, device)
    token_ids = torch.tensor([[(5 + 31 * i) % min(num_tokens, 90) for i in range(PROBE_LENGTH)]], device=device)
    handles = [module.register_forward_pre_hook(watcher.enter, with_kwargs=True) for module in model.modules()]
    handles += [module.register_forward_hook(watcher.leave) for module in model.modules()]
    own = own_states(model.config)  # one forward then needs no object for its states
    cache = {} if own else cache_argument(model, watcher.watched.probe)
    try:
        with torch.inference_mode(), keeping_float64(dtype):
            watcher.watched.logits = model(token_ids, use_cache=own is None, **cache).logits.to(device)
    finally:
        for handle in handles:
            handle.remove()
    watched = watcher.watched
    if not bool(torch.isfinite(watched.logits).all()):
        raise ModelError("it gives NaN or infinite logits; load it in float32 or check its weights")
    watched.keys_of = {layer: {watched.keepers[layer][-1]: tuple(keys)} for layer, keys in watched.initial.items()}
    if own is not None:
        _note_own_states(watched, own)
    return watched


_CLOSE = 1e-4
_CLOSE_IN_16_BITS = 3e-2


def find_head(model: LiveModule, watched: Watched, stream: Tensor, config: LiveConfig, dtype: torch.dtype) -> Head:
    """Returns the Head of a model. stream: what the last block gave in `watched`.

    Raises: ModelError if no module maps the stream to the input of the unembedding, or if the logits are computed from
    the unembedding's output in an unknown way.
    """
    is_wide = dtype in (torch.float32, torch.float64)
    limit = _CLOSE if is_wide else _CLOSE_IN_16_BITS
    unembed = model.get_output_embeddings()
    called = [call for call in watched.calls if call.module is unembed]
    if unembed is None or len(called) != 1 or called[0].value_in is None or called[0].value_out is None:
        raise ModelError("the model has no single unembedding")
    (last,) = called
    norm = _norm(watched.calls, stream, last)
    if norm is None and not is_wide and getattr(config, "residual_in_fp32", False):
        raise ModelError(
            f"it keeps the residual stream in float32 beside weights in {dtype}, and rounds it outside of a module; "
            'load it with dtype="float32", or with config.residual_in_fp32=False'
        )
    if norm is None:
        raise ModelError("no module maps the last block's output to the input of the unembedding")
    assert last.value_out is not None
    distances = [(_distance(f(last.value_out.clone()), watched.logits), f) for f in _finishes(config)]
    distance, finish = min(distances, key=lambda one: one[0])
    if distance <= limit:
        return Head(norm, unembed, finish)
    raise ModelError("the logits are not the unembedding's output, scaled or capped as the config says")


def _norm(calls: list[Call], stream: Tensor, last: Call) -> nn.Module | None:
    """Returns the module, or two in a row, that map the last stream to the unembedding's input; Identity if equal, None
    if no module does."""
    target = last.value_in
    assert target is not None
    if target.shape == stream.shape and torch.equal(target, stream):
        return nn.Identity()
    outer = [c for c in reversed(calls) if c.value_in is not None and c.value_out is not None and c.ended < last.began]
    firsts = [c for c in outer if c.value_in is not None and _equal(c.value_in, stream)]
    for call in firsts:
        if call.value_out is not None and _equal(call.value_out, target):
            return call.module
    for first in firsts:  # a norm, then a transformation, as in BERT
        for second in outer:
            if second.value_in is None or second.value_out is None or first.value_out is None:
                continue
            if _equal(second.value_in, first.value_out) and _equal(second.value_out, target):
                return nn.Sequential(first.module, second.module)
    return None


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)


def _distance(a: Tensor, b: Tensor) -> float:
    """Returns the largest difference, relative to the largest value; infinity for tensors of other shapes."""
    if a.shape != b.shape:
        return float("inf")
    return float((a.double() - b.double()).abs().max()) / max(float(b.abs().max()), 1e-30)


def _finishes(config: LiveConfig) -> list[Callable[[Tensor], Tensor]]:
    """Returns the functions that may follow the unembedding: none, and those whose number the config holds."""
    found: list[Callable[[Tensor], Tensor]] = [_same]
    for name, function in (
        ("final_logit_softcapping", _capped),
        ("output_logit_soft_cap", _capped),
        ("logits_scaling", _divided),
        ("logits_scaling", _multiplied),
        ("logit_scale", _multiplied),
        ("lm_head_multiplier", _multiplied),
    ):
        number = getattr(config, name, None)
        if isinstance(number, int | float) and number:
            found.append(partial(function, float(number)))
    return found


def _same(logits: Tensor) -> Tensor:
    return logits


def _capped(cap: float, logits: Tensor) -> Tensor:
    return (logits / cap).tanh() * cap


def _divided(number: float, logits: Tensor) -> Tensor:
    return logits / number


def _multiplied(number: float, logits: Tensor) -> Tensor:
    return logits * number
