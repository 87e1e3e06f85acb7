"""Captures and edits the states of a plain transformers model with PyTorch hooks on the modules that compute them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from cacheprobe.core.hook_names import (
    HEAD_SHAPES,
    HEADS,
    INPUT_POINT,
    OUTPUT_POINT,
    RECURRENT,
    SITES,
    hook_name,
    is_module,
    shape_of_heads,
)
from cacheprobe.core.live import LiveModule, ModuleValue
from cacheprobe.models.base import ModelError, StateEdit, StateSink
from cacheprobe.models.experts import capturing_routing, editing_routers, split
from cacheprobe.models.fast.graphs import Graphs
from cacheprobe.models.fast.tapes import Tapes
from cacheprobe.models.hf.attention import ATTENTION, OF_ATTENTION, QUERY
from cacheprobe.models.hf.lm import HuggingFaceLM
from cacheprobe.models.hf.modules import TensorEdit, find_tensor, hook_tensor
from cacheprobe.models.plain.recurrence import hooking_states
from cacheprobe.models.plain.structure import AddedPart, JointProjection, PlainBlock
from cacheprobe.models.settings import model_lock
from cacheprobe.models.weights import is_conv

HeadCut = Callable[[Tensor], Tensor]
"""Function that splits a module's tensor [b, t, w] into a site's tensor [b, t, h, d]."""

ModulePoint = tuple[nn.Module, str]
"""(module of the plain model, side): the side says whether the module's input or its output is read."""

_Inputs = tuple[tuple[ModuleValue, ...], dict[str, ModuleValue]]


class PlainSites(HuggingFaceLM):
    """Captures and edits activations at sites pre, S, T, C, of routers, recurrent states and, where the attention has
    such projections, q, k, v and z. Base class of PlainLM."""

    model: LiveModule
    blocks: Sequence[PlainBlock]
    head_shape: tuple[int, int]
    joints: Mapping[int, JointProjection]
    """Layer -> its joint projection of queries, keys and values, if it has one."""
    layer_shapes: Sequence[tuple[int, int, int]]
    state_shapes: Mapping[int, tuple[int, int]] = {}
    """Layer with a recurrent state -> (heads, numbers of a head)."""
    modules_before: frozenset[str] = frozenset()
    """Paths of the modules that end before the first block begins, such as the embedding of tokens."""
    num_hooked_outside: int = 0
    """Number of hooks on modules outside of the blocks, which then compute all tokens of a pass."""
    tapes: Tapes | Graphs | None = None
    listeners: dict[tuple[str, int], list[Callable[[Tensor], None]]]
    """Functions that take the activations of a (site, layer); sites pre, S, T and C."""
    attention_listeners: dict[int, dict[str, list[TensorEdit]]]
    """As `AttentionListeners`."""

    @property
    def attends_by_request(self) -> bool:
        """Whether attention runs request by request, over the slots in a pass's `spans`; otherwise one call covers
        the batch."""
        return self.model.config._attn_implementation == ATTENTION

    @contextmanager
    def capturing(self, sites: Sequence[tuple[str, int]], sink: StateSink) -> Iterator[None]:
        """Returns a context manager. Inside its `with`, a forward calls `sink(site, layer, activation)` for each (site,
        layer) pair of `sites` whose layer it runs. Raises: ModelError for a site that the model lacks."""

        def keep(site: str, layer: int, value: Tensor) -> None:
            """Calls the sink and returns None, so that the activation stays unchanged. While a tape runs, listeners
            call it."""
            if self.tapes is None or not self.tapes.is_busy:
                sink(site, layer, value)

        others, routers = split(sites)
        recurrent = [layer for site, layer in others if site == RECURRENT]
        of_attention = [place for place in others if place[0] in OF_ATTENTION]
        others = [place for place in others if place[0] not in (RECURRENT, *OF_ATTENTION)]
        with (
            self.editing(others, keep),
            self._listening_to_attention(of_attention, sink),
            capturing_routing(self.name, self.mixtures, routers, sink),
            hooking_states(self.name, self.model, self._recurrent_paths, recurrent, sink=sink),
            self._listening([place for place in others if place[0] in ("pre", *SITES)], sink),
        ):
            yield

    @contextmanager
    def _listening(self, places: Sequence[tuple[str, int]], sink: StateSink) -> Iterator[None]:
        """Keeps `sink` among the listeners of places inside the `with`, for a forward that calls no modules."""
        own = [(place, partial(sink, *place)) for place in places]
        for place, listener in own:
            self.listeners.setdefault(place, []).append(listener)
        try:
            yield
        finally:
            for place, listener in own:
                self.listeners[place].remove(listener)
                if not self.listeners[place]:
                    del self.listeners[place]

    @contextmanager
    def _listening_to_attention(self, places: Sequence[tuple[str, int]], sink: StateSink) -> Iterator[None]:
        """Keeps `sink` among the listeners of the attention function inside the `with`."""
        before, listeners = self.attention_listeners, {key: dict(v) for key, v in self.attention_listeners.items()}
        for site, layer in places:
            self._require_layer(layer)
            if refusal := self.lacking([site]):
                raise ModelError(refusal)
            self._require_attention(layer)
            sites = listeners.setdefault(id(self._module(self.blocks[layer].attention)), {})
            sites[site] = [*sites.get(site, ()), partial(sink, site, layer)]
        self.attention_listeners = listeners
        try:
            yield
        finally:
            self.attention_listeners = before

    def _require_layer(self, layer: int) -> None:
        if not 0 <= layer < self.n_layers:
            raise ModelError(f"{self.name} has layers 0 to {self.n_layers - 1}, no layer {layer}")

    @property
    def _recurrent_paths(self) -> dict[int, str]:
        """Layer -> path of its module, for layers that have a recurrent state."""
        return {layer: self.blocks[layer].mixer for layer in self.state_shapes}

    @contextmanager
    def editing(self, sites: Sequence[tuple[str, int]], edit: StateEdit) -> Iterator[None]:
        """Returns a context manager. Inside its `with`, a forward calls `edit(site, layer, activation)` for each (site,
        layer) pair of `sites` whose layer it runs. A returned tensor replaces the activation; None leaves the
        activation unchanged. Raises: ModelError for a site that the model lacks."""
        others, routers = split(sites)
        with model_lock, ExitStack() as stack:
            stack.enter_context(editing_routers(self.name, self.mixtures, routers, edit))
            recurrent = [layer for site, layer in others if site == RECURRENT]
            stack.enter_context(hooking_states(self.name, self.model, self._recurrent_paths, recurrent, edit=edit))
            for site, layer in others:
                if site != RECURRENT:
                    self._add_hooks(stack, site, layer, partial(edit, site, layer))
            yield

    def _add_hooks(self, stack: ExitStack, site: str, layer: int, edit: TensorEdit) -> None:
        """Registers the hooks of one site, to be removed when `stack` closes."""
        if is_module(site):
            return self._add_module(stack, site, edit)
        self._require_layer(layer)
        block = self.blocks[layer]
        if site == "pre" and block.entry:
            stack.callback(change((self._module(block.entry), OUTPUT_POINT), edit).remove)
        elif site in ("pre", "S"):
            point = INPUT_POINT if site == "pre" else OUTPUT_POINT
            stack.callback(change((self._module(block.path), point), edit).remove)
        elif site in ("T", "C"):
            parts = block.attended if site == "T" else block.mlp
            if len(parts) == 1 and parts[0].factor == 1:
                edit_tokens = partial(self._edit_tokens, edit)
                stack.callback(change((self._module(parts[0].path), OUTPUT_POINT), edit_tokens).remove)
            elif parts:
                self._add_sum(stack, block, parts, edit)
            else:
                stack.callback(change((self._module(block.path), OUTPUT_POINT), partial(_edit_nothing, edit)).remove)
        else:
            place, cut = self._heads(site, layer)
            stack.callback(change(place, partial(_edit_heads, cut, edit)).remove)

    def _add_module(self, stack: ExitStack, name: str, edit: TensorEdit) -> None:
        """Registers the hook of a module's tensor, to be removed when `stack` closes. Raises: ModelError for a module
        that the model lacks, and for queries where cacheprobe's attention does not run."""
        place = find_tensor(self.model, name, self.name)

        of_tokens = partial(self.edit_tokens, name, edit)
        if place.side == QUERY:
            if not self.attends_by_request or place.path not in {block.attention for block in self.blocks}:
                raise ModelError(f"{self.name}: no queries are seen at {place.path}; name an attention of a block")
            stack.enter_context(self._listening_to_queries(self._module(place.path), of_tokens))
            return
        stack.callback(hook_tensor(self._module(place.path), place, of_tokens).remove)
        is_inside = any(f"{place.path}.".startswith(f"{block.path}.") for block in self.blocks)
        if not is_inside and place.path not in self.modules_before:
            self.num_hooked_outside += 1
            stack.callback(self._unhook_outside)

    def _unhook_outside(self) -> None:
        self.num_hooked_outside -= 1

    @contextmanager
    def _listening_to_queries(self, module: nn.Module, edit: TensorEdit) -> Iterator[None]:
        """Inside the `with`, the attention function gives the queries of an attention module to `edit`."""
        before = self.attention_listeners
        own = before.get(id(module), {})
        self.attention_listeners = {**before, id(module): {**own, QUERY: [*own.get(QUERY, ()), edit]}}
        try:
            yield
        finally:
            self.attention_listeners = before

    def module_layer(self, name: str) -> int:
        """Returns the layer of a module outside of the blocks: 0 of one that runs before them, otherwise the last
        layer. Raises: ModelError for a module that the model lacks."""
        return 0 if find_tensor(self.model, name, self.name).path in self.modules_before else self.n_layers - 1

    def _edit_tokens(self, edit: TensorEdit, value: Tensor) -> Tensor | None:
        """Calls `edit` with a value as [b, t, m]; some modules give [b * t, m]."""
        edited = edit(value.view(-1, self.token_shape[1], value.shape[-1]))
        return None if edited is None else edited.view(value.shape)

    def _add_sum(self, stack: ExitStack, block: PlainBlock, parts: Sequence[AddedPart], edit: TensorEdit) -> None:
        """Registers hooks for a state that is the sum of the outputs of `parts`, each times its factor, in the order in
        which they run. An edit changes the last one."""
        earlier: list[Tensor] = []

        def keep(factor: float, value: Tensor) -> None:
            """Appends a value, [b, t, m] and times its factor, to `earlier`."""
            value = value.reshape(-1, self.token_shape[1], value.shape[-1])
            earlier.append(value if factor == 1 else value * factor)

        def forget(*given: object) -> None:
            """Empties `earlier` before the block runs: a pass that failed inside the block may have left values."""
            earlier.clear()

        last = parts[-1]
        stack.callback(self._module(block.path).register_forward_pre_hook(forget).remove)
        for part in parts[:-1]:
            handle = change((self._module(part.path), OUTPUT_POINT), partial(keep, part.factor))
            stack.callback(handle.remove)
        edit_last = partial(self._edit_tokens, partial(_edit_sum, earlier, last.factor, edit))
        stack.callback(change((self._module(last.path), OUTPUT_POINT), edit_last).remove)

    def _module(self, path: str) -> nn.Module:
        return self.model.get_submodule(path)

    def _heads(self, site: str, layer: int) -> tuple[ModulePoint, HeadCut]:
        """Returns (module and side, function that splits its tensor into heads) of site q, k, v or z of a layer.
        Raises: ModelError if the attention has no such projection."""
        heads = self.heads_of(layer)
        if site in HEAD_SHAPES:
            shape = shape_of_heads(site, heads, *self.layer_shapes[layer])
            if site == HEADS:
                return (self.projection(layer), INPUT_POINT), partial(by_head, shape)
            module = self._module(self.blocks[layer].attention)._modules.get(f"{site}_proj")
            if module is not None and getattr(module, "out_features", None) == shape[0] * shape[1]:
                return (module, OUTPUT_POINT), partial(by_head, shape)
            if (joint := self.joints.get(layer)) is not None and joint.heads == heads:
                return (self._module(joint.path), OUTPUT_POINT), partial(joint.part, "qkv".index(site))
        raise ModelError(
            f"{self.name}: the attention of layer {layer} has no module for {hook_name(site, layer)}; leave {site!r} "
            "out"
        )

    def lacking(self, sites: Sequence[str]) -> str:
        """Returns text on the first of these sites of heads that a layer with attention lacks, "" if there is none."""
        layers = [layer for layer, (heads, *_) in enumerate(self.layer_shapes) if heads]
        if not self.attends_by_request and (hidden := sorted(set(sites) & set(OF_ATTENTION))):
            return (
                f"{self.name}: transformers has no attention function for it, so no {hidden[0]} is seen; leave it out"
            )
        try:
            for site, layer in product((set(sites) & set(HEAD_SHAPES)) - set(OF_ATTENTION), layers):
                self._heads(site, layer)
        except ModelError as refusal:
            return str(refusal)
        return ""

    def heads_of(self, layer: int) -> int:
        """Returns the number of query heads of a layer, from the width of its output projection. Raises: ModelError as
        `projection`."""
        return int(_inputs(self.projection(layer))) // self.layer_shapes[layer][2]

    def _require_attention(self, layer: int) -> None:
        if not self.layer_shapes[layer][0]:
            kind = "is recurrent" if self.blocks[layer].mixer else "is an MLP"
            raise ModelError(f"{self.name}: layer {layer} {kind} and has no attention heads; name other layers")

    def projection(self, layer: int) -> LiveModule:
        """Returns the module that projects the heads of a layer into the residual stream. Raises: ModelError if the
        attention has no linear module whose input is a whole number of heads, or several that may be it; and for a
        layer without attention."""
        self._require_attention(layer)
        kv_heads, _, value_width = self.layer_shapes[layer]
        attention = self._module(self.blocks[layer].attention)
        width = int(getattr(self, "d_model", 0))
        fitting = [
            module
            for name, module in attention.named_modules()
            if name.rpartition(".")[2] in ("o_proj", "out_proj", "dense", "c_proj", "wo", "attn_out", "out", "output")
            and (is_conv(module) or isinstance(module, nn.Linear))
            and _outputs(module) == width
            and _inputs(module) % (value_width * kv_heads) == 0
        ]
        if len(fitting) != 1:
            raise ModelError(f"{self.name}: the heads of layer {layer} have no output projection to be told apart by")
        return fitting[0]


def _inputs(module: LiveModule) -> int:
    return int(module.weight.shape[0] if is_conv(module) else module.in_features)


def _outputs(module: LiveModule) -> int:
    return int(module.weight.shape[1] if is_conv(module) else module.out_features)


def by_head(shape: tuple[int, int], value: Tensor) -> Tensor:
    """Returns a tensor [b, t, h * d] as [b, t, h, d], for (h, d) of `shape`."""
    return value.unflatten(-1, shape)


def _edit_heads(cut: HeadCut, edit: TensorEdit, value: Tensor) -> Tensor | None:
    edited = edit(cut(value))
    if edited is not None and edited.numel() != value.numel():
        raise ModelError("one of the queries, keys and values of a joint projection cannot be edited by itself")
    return None if edited is None else edited.reshape(value.shape)


def _edit_nothing(edit: TensorEdit, stream: Tensor) -> Tensor | None:
    """Calls `edit` with zeros, the C of a block without an MLP or the T of a block without attention; adds what it
    returns to the block's output."""
    edited = edit(torch.zeros_like(stream))
    return None if edited is None else stream + edited


def _edit_sum(earlier: list[Tensor], factor: float, edit: TensorEdit, value: Tensor) -> Tensor | None:
    total = value if factor == 1 else value * factor
    others = sum(earlier[1:], earlier[0]) if earlier else None
    earlier.clear()
    edited = edit(total if others is None else others + total)
    if edited is None:
        return None
    rest = edited if others is None else edited - others
    return rest if factor == 1 else rest / factor


def change(place: ModulePoint, edit: TensorEdit) -> RemovableHandle:
    """Registers a PyTorch hook at `place`, a module's input or output: `edit` gets the tensor, and a tensor that `edit`
    returns replaces it. Returns the handle that removes the hook."""
    module, point = place
    if point == OUTPUT_POINT:

        def on_output(module: nn.Module, args: tuple[ModuleValue, ...], output: ModuleValue) -> ModuleValue:
            """Returns the module's output with its first tensor edited; None if `edit` returned None."""
            if not isinstance(output, tuple):
                return edit(output)
            edited = edit(output[0])
            return None if edited is None else (edited, *output[1:])

        return module.register_forward_hook(on_output)

    def on_input(module: nn.Module, args: tuple[ModuleValue, ...], kwargs: dict[str, ModuleValue]) -> _Inputs | None:
        """Returns (args, kwargs) of the module with the first tensor edited; None if `edit` returned None."""
        name = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs), "")
        edited = edit(args[0] if args else kwargs[name])
        if edited is None:
            return None
        return ((edited, *args[1:]), kwargs) if args else (args, {**kwargs, name: edited})

    return module.register_forward_pre_hook(on_input, with_kwargs=True)
