"""Runs the recurrent layers of a plain model one token and one cache row at a time, from states that the cache keeps by
position.

transformers computes several tokens in chunks, whose rounding depends on where a chunk begins, and keeps the last state
only. Token by token, a token has the same bits in every window, pads come after it, and each state can be kept.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from cacheprobe.core.hook_names import RECURRENT
from cacheprobe.core.live import LiveModule, ModuleValue
from cacheprobe.kvcache.recurrent import LayerStates, RecurrentMemory
from cacheprobe.models.base import ModelError, StateSink

CONV = "conv"

Step = Callable[[Tensor, LayerStates], tuple[Tensor, LayerStates]]
"""Function (token [b, 1, m], states) that returns (outputs [b, 1, m], new states)."""


class StepCache(Cache):
    """Presents the states of one recurrent layer, [b, ...] each, as transformers' Cache for one new token."""

    def __init__(self, states: LayerStates) -> None:
        super().__init__(layers=[])
        self.states = dict(states)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Returns a convolution state, which some layers change in place; None if the layer has none."""
        return self.states.get((CONV, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Returns a recurrent state, which some layers change in place; None if the layer has none."""
        return self.states.get((RECURRENT, state_idx))

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: object) -> Tensor:
        """Appends the new token's inputs to a convolution state. Returns the old state followed by them."""
        old = self.states[CONV, state_idx]
        full = torch.cat([old, conv_states], dim=-1)
        self.states[CONV, state_idx] = full[..., -old.shape[-1] :].clone()
        return full

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: object
    ) -> Tensor:
        """Replaces a recurrent state, and returns the new one."""
        self.states[RECURRENT, state_idx] = recurrent_states
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Returns True: before the first token, the states are zeros."""
        return True

    def is_recording_past(self, layer_idx: int) -> bool:
        """Returns False: our cache keeps the past."""
        return False


class RecurrentPlaces:
    """Holds which cache rows and positions one forward feeds, and the memory of their states."""

    def __init__(self, memory: RecurrentMemory, cache_rows: Sequence[int], starts: Sequence[int]) -> None:
        self.memory = memory
        self.rows, self.starts = list(map(int, cache_rows)), list(map(int, starts))
        self.pairs = list(zip(self.rows, self.starts, strict=True))


class StepForward:
    """Replaces the forward of a recurrent layer: feeds one token at a time.

    Twin: the layer's own forward without a cache, close(1e-4) in float32; `check_plain` compares the logits at load.
    """

    def __init__(self, mixer: nn.Module, layer: int) -> None:
        self.mixer, self.layer = mixer, layer
        self.listeners: list[Callable[[Tensor], None]] = []
        """Functions that take the recurrent state after every token of a forward, [b, t, h, d]."""

    def __call__(self, *args: ModuleValue, **kwargs: ModuleValue) -> ModuleValue:
        """Returns what the layer's own forward returns: outputs [b, t, m] of inputs [b, t, m]."""
        bound = self._signature.bind(*args, **kwargs)
        caches = [name for name, value in bound.arguments.items() if isinstance(value, Cache)]
        places = getattr(bound.arguments[caches[0]], "places", None) if caches else None
        if places is None:
            return type(self.mixer).forward(self.mixer, *args, **kwargs)
        first = next(iter(bound.arguments))
        if "attention_mask" in bound.arguments:
            bound.arguments["attention_mask"] = None  # pads come last, after every token whose state counts
        inputs = bound.arguments[first]

        def step(value: Tensor, states: LayerStates) -> tuple[Tensor, LayerStates]:
            """Feeds one token [b, 1, m]. Returns (its outputs, the new states)."""
            one = StepCache(states)
            bound.arguments[first], bound.arguments[caches[0]] = value, one
            return type(self.mixer).forward(self.mixer, *bound.args, **bound.kwargs), one.states

        return self._steps(inputs, places, step)

    def _steps(self, inputs: Tensor, places: RecurrentPlaces, step: Step) -> Tensor:
        """Feeds inputs [b, t, m] token by token, each batch index by itself: its bits depend on no other. Batch indices
        that continue one shared prefix are fed together."""
        memory, layer = places.memory, self.layer
        kept: list[Tensor] = []  # states for the listeners
        if not memory.is_written:
            before = memory.after(layer, places.rows[0], places.starts[0] - 1)
            states: LayerStates = {key: _expanded(value, len(inputs)) for key, value in before.items()}
            outputs = []
            for t in range(inputs.shape[1]):
                output, states = step(inputs[:, t : t + 1], states)
                outputs.append(output)
                kept += [_by_head(states)] if self.listeners else []
            self._tell(kept)
            return torch.cat(outputs, dim=1)
        done: dict[int, Tensor] = {}  # by cache row: only dummies use a row twice, and nothing reads them
        for b, (row, start) in enumerate(zip(places.rows, places.starts, strict=True)):
            if row not in done:
                memory.forget_before(layer, row, start)
                done[row] = self._row(inputs[b : b + 1], memory, row, start, step)
        if self.listeners:
            for t in range(inputs.shape[1]):
                of_rows = [memory.after(layer, row, start + t)[RECURRENT, 0] for row, start in places.pairs]
                kept.append(_by_head({(RECURRENT, 0): torch.stack(of_rows)}))
            self._tell(kept)
        return torch.cat([done[row] for row in places.rows])

    def _tell(self, kept: Sequence[Tensor]) -> None:
        """Calls the listeners with the states [b, 1, h, d] of each token, joined."""
        for listener in self.listeners:
            listener(torch.cat(list(kept), dim=1))

    def _row(self, inputs: Tensor, memory: RecurrentMemory, row: int, start: int, step: Step) -> Tensor:
        """Returns the outputs [1, t, m] of the tokens of one cache row, and records the state after each."""
        before = memory.after(self.layer, row, start - 1)
        states: LayerStates = {key: _expanded(value, 1) for key, value in before.items()}
        outputs = []
        for t in range(inputs.shape[1]):
            output, states = step(inputs[:, t : t + 1].contiguous(), states)
            memory.record(self.layer, row, start + t, {key: value[0] for key, value in states.items()})
            outputs.append(output)
        return torch.cat(outputs, dim=1)

    @cached_property
    def _signature(self) -> inspect.Signature:
        """Parameters of the layer's own forward, without `self`."""
        own = inspect.signature(type(self.mixer).forward)
        return own.replace(parameters=list(own.parameters.values())[1:])


def step_by_step(model: LiveModule, paths: Mapping[int, str]) -> None:
    """Makes recurrent layers run token by token over our cache. paths: of their modules, by layer.

    Raises: ModelError if a module's forward was replaced already.
    """
    for layer, path in paths.items():
        mixer = model.get_submodule(path)
        if "forward" in vars(mixer):
            raise ModelError(f"the forward of {path} was replaced already")
        vars(mixer)["forward"] = StepForward(mixer, layer)


@contextmanager
def capturing_states(
    name: str, model: LiveModule, paths: Mapping[int, str], layers: Sequence[int], sink: StateSink
) -> Iterator[None]:
    """Inside the `with`, a forward calls `sink("recurrent", layer, states)`, with states [b, t, h, d] after each token.

    name: of the model, for errors.  paths: of the modules that have a recurrent state, by layer.
    Raises: ModelError for a layer without one.
    """
    with ExitStack() as stack:
        for layer in layers:
            if layer not in paths:
                there = f"there are some at layers {', '.join(map(str, paths))}" if paths else "no layer has one"
                raise ModelError(f"{name} has no recurrent state at layer {layer}; {there}")
            listeners = vars(model.get_submodule(paths[layer]))["forward"].listeners
            listener = partial(sink, RECURRENT, layer)
            listeners.append(listener)
            stack.callback(listeners.remove, listener)
        yield


def _by_head(states: LayerStates) -> Tensor:
    """Returns a copy of a recurrent state [b, h, ...] as [b, 1, h, d]."""
    value = states[RECURRENT, 0]
    return value.reshape(len(value), 1, value.shape[1], -1).clone()


def _expanded(value: Tensor, count: int) -> Tensor:
    """Returns a new tensor with `count` copies of a state along a new batch axis."""
    return value.expand(count, *value.shape).clone()
