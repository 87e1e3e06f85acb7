"""Runs the recurrent layers of a plain model one token and one cache row at a time, from states that the cache keeps by
position.

transformers computes several tokens in chunks, whose rounding depends on where a chunk begins, and keeps the last state
only. Token by token, a token has the same bits in every window, pads come after it, and each state can be kept.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import inf

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from cacheprobe.core.hook_names import RECURRENT
from cacheprobe.core.live import LiveModule, ModuleValue
from cacheprobe.kvcache.recurrent import LayerStates, RecurrentMemory, StateKey
from cacheprobe.models.base import ModelError, StateEdit, StateSink
from cacheprobe.models.settings import FunctionMode

CONV = "conv"

Step = Callable[[Tensor, LayerStates], tuple[Tensor, LayerStates]]
"""Function (token [b, 1, m], states) that returns (outputs [b, 1, m], new states)."""
RunMixer = Callable[[object], ModuleValue]
"""Function that runs a module's own forward on one token, with an object that holds the states before it."""
FeedToken = Callable[[LiveModule, RunMixer, LayerStates], tuple[Tensor, LayerStates]]
"""Function (module, its RunMixer, states) that feeds one token with the states as the module takes them. Returns
(outputs [b, 1, m], new states)."""


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


class PlacesCache(Cache):
    """Holds where recurrent modules find their states in our cache; it has no layers of its own."""

    def __init__(self, places: "RecurrentPlaces | None") -> None:
        super().__init__(layers=[])
        self.places = places


class RecurrentPlaces:
    """Holds which cache rows and positions one forward feeds, and the memory of their states."""

    def __init__(self, memory: RecurrentMemory, cache_rows: Sequence[int], starts: Sequence[int]) -> None:
        self.memory = memory
        self.rows, self.starts = list(map(int, cache_rows)), list(map(int, starts))


@dataclass(eq=False)
class _Lane:
    """Holds what is fed in one call: batch indices of the pass, their states [b, ...], and their outputs so far."""

    indices: list[int]
    states: LayerStates
    outputs: list[Tensor] = field(default_factory=list)


class StepForward:
    """Replaces the forward of a module with a recurrent state: feeds one token at a time.

    Twin: the layer's own forward without a cache, close(1e-4) in float32; `check_model` compares the logits at load.
    """

    def __init__(self, mixer: nn.Module, layer: int, keys: Sequence[StateKey], feed: FeedToken | None = None) -> None:
        """keys: of the layer's states that the module keeps.  feed: for states outside of transformers' Cache; the
        module then returns a pair, outputs and states."""
        self.mixer, self.layer, self.keys, self.feed = mixer, layer, tuple(keys), feed
        self.edits: list[Callable[[Tensor], Tensor | None]] = []
        """Functions that may change the newest recurrent state, called after each token; see `StateEdit`."""
        self.listeners: list[Callable[[Tensor], None]] = []
        """Functions that take the recurrent state after every token of a forward, as edited, [b, t, h, d]."""

    def __call__(self, *args: ModuleValue, **kwargs: ModuleValue) -> ModuleValue:
        """Returns what the module's own forward returns: outputs [b, t, m] of inputs [b, t, m]."""
        bound = self._signature.bind(*args, **kwargs)
        found = (pair for pair in bound.arguments.items() if isinstance(pair[1], Cache))
        name, held = next(found, ("", None))
        if (places := getattr(held, "places", None)) is None:
            return type(self.mixer).forward(self.mixer, *args, **kwargs)
        first = next(iter(bound.arguments))
        if "attention_mask" in bound.arguments:
            bound.arguments["attention_mask"] = None  # pads come last, after every token whose state counts
        inputs = bound.arguments[first]

        def step(value: Tensor, states: LayerStates) -> tuple[Tensor, LayerStates]:
            """Feeds one token [b, 1, m]. Returns (its outputs, the new states)."""
            bound.arguments[first] = value

            def run(states_held: object) -> ModuleValue:
                """Runs the module's own forward with these states."""
                bound.arguments[name] = states_held
                with self._limits():
                    return type(self.mixer).forward(self.mixer, *bound.args, **bound.kwargs)

            return (self.feed or _in_cache)(self.mixer, run, states)

        outputs = self._steps(inputs, places, step)
        return outputs if self.feed is None else (outputs, held)

    def _limits(self) -> AbstractContextManager[object]:
        """Returns a context in which one token gets the limits of time steps that several tokens get."""
        least, most = getattr(self.mixer, "time_step_limit", None) or (0.0, inf)
        return nullcontext() if least <= 0 and most == inf else FunctionMode(partial(_limited, least, most))

    def _steps(self, inputs: Tensor, places: RecurrentPlaces, step: Step) -> Tensor:
        """Feeds inputs [b, t, m] token by token, each cache row by itself: its bits depend on no other. Batch indices
        that continue one shared prefix are fed together. Records the states after each token, as edited."""
        memory, lanes = places.memory, self._lanes(len(inputs), places)
        fed = [b for lane in lanes for b in lane.indices]
        of_row = {places.rows[b]: i for i, b in enumerate(fed)} if memory.is_written else {}
        order = [of_row[row] for row in places.rows] if memory.is_written else fed
        after: list[Tensor] = []  # states [b, h, d] after each token
        for t in range(inputs.shape[1]):
            for lane in lanes:
                output, lane.states = step(inputs[lane.indices, t : t + 1].contiguous(), lane.states)
                lane.outputs.append(output)
            if self.edits or self.listeners:
                newest = torch.cat([_by_head(lane.states) for lane in lanes])[order]
                newest = self._edited(newest, t + 1, lanes)
                if self.listeners:
                    after.append(newest)
            if memory.is_written:
                for lane in lanes:
                    (b,) = lane.indices
                    states = {key: value[0] for key, value in lane.states.items()}
                    memory.record(self.layer, places.rows[b], places.starts[b] + t, states)
        for listener in self.listeners:
            listener(torch.stack(after, dim=1))
        return torch.cat([torch.cat(lane.outputs, dim=1) for lane in lanes])[order]

    def _lanes(self, count: int, places: RecurrentPlaces) -> list[_Lane]:
        """Returns the lanes of a pass with `count` batch indices, with the states before its first token. One for all
        if the memory takes no new states (they continue a shared prefix); else one for each cache row, of which only
        the last of these states is kept."""
        memory, layer = places.memory, self.layer
        if not memory.is_written:
            before = memory.after(layer, places.rows[0], places.starts[0] - 1)
            return [_Lane(list(range(count)), {key: _expanded(before[key], count) for key in self.keys})]
        first = {row: b for b, row in reversed(list(enumerate(places.rows)))}
        lanes = []
        for b in sorted(first.values()):  # only dummies use a row twice, and nothing reads them
            memory.forget_before(layer, places.rows[b], places.starts[b])
            before = memory.after(layer, places.rows[b], places.starts[b] - 1)
            lanes.append(_Lane([b], {key: _expanded(before[key], 1) for key in self.keys}))
        return lanes

    def _edited(self, states: Tensor, fed: int, lanes: Sequence[_Lane]) -> Tensor:
        """Lets the edits change the states [b, h, d] after `fed` tokens. Returns the changed states, and puts them into
        the lanes."""
        for edit in self.edits:
            if (edited := edit(states[:, None].expand(-1, fed, -1, -1))) is not None:  # a view, of any length
                states = edited[:, -1]
                for lane in lanes:
                    old = lane.states[RECURRENT, 0]
                    new = states[lane.indices].reshape(old.shape).clone()
                    lane.states = {**lane.states, (RECURRENT, 0): new}
        return states

    @cached_property
    def _signature(self) -> inspect.Signature:
        """Parameters of the layer's own forward, without `self`."""
        own = inspect.signature(type(self.mixer).forward)
        return own.replace(parameters=list(own.parameters.values())[1:])


def _limited(least: float, most: float, func: Callable[..., object], args: Sequence[object], kwargs: dict) -> object:
    """Returns the result of a torch function, limited if it is a softplus: the time steps.

    transformers limits those of several tokens and not those of one, so that Nemotron-H, whose steps have a lower
    limit, computes a text otherwise than its tokens one by one.
    """
    result = func(*args, **kwargs)
    return result.clamp(least, most) if func is nn.functional.softplus and isinstance(result, Tensor) else result


def step_by_step(
    model: LiveModule, modules: Mapping[int, Mapping[str, Sequence[StateKey]]], feed: FeedToken | None = None
) -> None:
    """Makes recurrent layers run token by token over our cache.

    modules: layer -> path of each of its recurrent modules -> the states that this module keeps.  feed: as
    StepForward.  Raises: ModelError if a module's forward was replaced already.
    """
    for layer, keys_of in modules.items():
        for path, keys in keys_of.items():
            mixer = model.get_submodule(path)
            if "forward" in vars(mixer):
                raise ModelError(f"the forward of {path} was replaced already")
            vars(mixer)["forward"] = StepForward(mixer, layer, keys, feed)


@contextmanager
def hooking_states(
    name: str,
    model: LiveModule,
    paths: Mapping[int, str],
    layers: Sequence[int],
    sink: StateSink | None = None,
    edit: StateEdit | None = None,
) -> Iterator[None]:
    """Inside the `with`, a forward calls `edit("recurrent", layer, states)` after each token, and `sink` with the same
    arguments once, after the last token.

    name: of the model, for errors.  paths: of the modules that have a recurrent state, by layer.
    Raises: ModelError for a layer without one.
    """
    with ExitStack() as stack:
        for layer in layers:
            if layer not in paths:
                there = f"there are some at layers {', '.join(map(str, paths))}" if paths else "no layer has one"
                raise ModelError(f"{name} has no recurrent state at layer {layer}; {there}")
            forward = vars(model.get_submodule(paths[layer]))["forward"]
            for called, hooks in ((sink, forward.listeners), (edit, forward.edits)):
                if called is not None:
                    hook = partial(called, RECURRENT, layer)
                    hooks.append(hook)
                    stack.callback(hooks.remove, hook)
        yield


def _in_cache(module: LiveModule, run: RunMixer, states: LayerStates) -> tuple[Tensor, LayerStates]:
    """Presents states as transformers' Cache, as `FeedToken` says."""
    one = StepCache(states)
    return run(one), one.states


def _by_head(states: LayerStates) -> Tensor:
    """Returns a copy of a recurrent state [b, h, ...] as [b, h, d]."""
    value = states[RECURRENT, 0]
    return value.reshape(len(value), value.shape[1], -1).clone()


def _expanded(value: Tensor, count: int) -> Tensor:
    """Returns a new tensor with `count` copies of a state along a new batch axis."""
    return value.expand(count, *value.shape).clone()
