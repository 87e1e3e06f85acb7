"""The plain Hugging Face model as a CachedLM: fused attention, the bridge's own weights, the bridge's hook names.

Hooks on the bridge have no effect here; `models.paths` decides which of the two forwards runs. Interventions use hooks
on this model.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.hooks import RemovableHandle

from cacheprobe.core.hook_names import HEAD_SITES, HEADS, INPUT_POINT, OUTPUT_POINT, hook_name
from cacheprobe.core.live import LiveModule, ModuleValue
from cacheprobe.kvcache.cache import KVCache
from cacheprobe.models.base import ModelError, StateEdit, StateSink
from cacheprobe.models.fast.functional import FunctionalForward, Product
from cacheprobe.models.fast.functional_gpt import LeanGPT
from cacheprobe.models.fast.head_places import Cut, head_cut, joint_place, require_no_pattern
from cacheprobe.models.hf.attention import ATTENTION, attending
from cacheprobe.models.hf.bridge import BridgeLM
from cacheprobe.models.hf.cache import ForwardInputs, staged
from cacheprobe.models.hf.float64 import keeping_float64
from cacheprobe.models.hf.hooked import HookPoint
from cacheprobe.models.hf.shared import WRAPPED, SharedWeights, empty_model
from cacheprobe.models.turns import computing, one_at_a_time
from cacheprobe.ops.attention.by_request import BY_REQUEST
from cacheprobe.ops.compiled.block import CompiledBlock
from cacheprobe.ops.wide_product import wide_product, wide_rows, widening

LEAN = (FunctionalForward, LeanGPT)
"""Forwards without modules; each supports some families."""
_Inputs = tuple[tuple[ModuleValue, ...], dict[str, ModuleValue]]
Place = tuple[nn.Module, str]
"""A module of the plain model, and whether its input or its output is read."""


class HookedHF:
    """Runs the Hugging Face model inside a bridge directly, on the same weights and the same KVCache.

    Twin: BridgeLM: logits, S, T, C, keys and values close(1e-4) in float32, since fused attention reorders sums.
    """

    def __init__(self, origin: BridgeLM, lean: bool = True) -> None:
        """lean: skip the modules when no hook needs them and the family is supported; results have the same bits either
        way.

        Raises: ModelError if the bridge's weights were processed, or if a hook of the bridge matches no module of the
        model.
        """
        bridge = origin.bridge
        if bridge.compatibility_mode or getattr(bridge, "_weights_processed", False):
            raise ModelError(f"{origin.name}: the bridge's weights were processed (compatibility mode)")
        self.origin = origin
        self.model: LiveModule = empty_model(bridge.original_model)
        self.weights = SharedWeights(bridge.original_model, self.model)
        self._places = self._all_places()
        self._wide_rows = wide_rows(self.dtype, self.device)
        plain = partial(wide_product, from_rows=self._wide_rows) if self._wide_rows else linear
        self._product: Product = origin.compiled.product if origin.compiled else plain
        if self._product is not linear:
            self._replace_products()
        self._compiled_block = (
            origin.compiled.block if origin.compiled and FunctionalForward.takes(self.model) else None
        )
        if self._compiled_block is not None:
            self._replace_norms(self._compiled_block)
        self._lean_kind = next((kind for kind in LEAN if lean and kind.takes(self.model)), None)
        self._lean: FunctionalForward | LeanGPT | None = None
        self._modules = list(self.model.modules())
        self._listeners: dict[tuple[str, int], list[Callable[[Tensor], object]]] = {}

    def __repr__(self) -> str:
        return f"HookedHF({repr(self.origin).removeprefix('BridgeLM(')}"

    def _replace_products(self) -> None:
        for module in self.model.modules():
            if type(module) is nn.Linear:
                vars(module)["forward"] = partial(_linear_by, self._product, module)

    def _replace_norms(self, block: CompiledBlock) -> None:
        """Replaces the norms of llama-like models, which are all of one kind."""
        for module in self.model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                vars(module)["forward"] = partial(_norm_by, block, module)

    def _all_places(self) -> dict[tuple[str, int], Place]:
        points = self.origin.bridge.hook_dict
        return {
            (site, layer): self._place(points, hook_name(site, layer))
            for layer in range(self.n_layers)
            for site in ("pre", "S", "T", "C")
        }

    def _place(self, points: dict[str, HookPoint], name: str) -> Place:
        """Returns the module and side that a hook of the bridge reads: alias -> canonical name -> component -> its HF
        module."""
        component, _, end = str(points[name].name).rpartition(".")
        original = self.origin.bridge.get_submodule(component)._modules.get(WRAPPED)
        path = self.weights.path_of(original)
        if path is None or end not in (INPUT_POINT, OUTPUT_POINT):
            where = points[name].name
            raise ModelError(f"{self.name}: {name} is read at {where}, which is no module of the plain model")
        return self.model.get_submodule(path), end

    def _head_place(self, site: str, layer: int) -> tuple[Place, Cut]:
        """Returns the module that computes q, k, v or z of a layer, and the function that splits its tensor into
        heads."""
        require_no_pattern(self.name, site)
        points, name = self.origin.bridge.hook_dict, hook_name(site, layer)
        if name not in points:
            raise ModelError(f"{self.name} has no hook {name}")
        try:
            return self._place(points, name), head_cut(self.origin, site, layer)
        except ModelError:
            path, cut = joint_place(self.origin, self.weights, site, layer)
            return (self.model.get_submodule(path), OUTPUT_POINT), cut

    @one_at_a_time()
    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        cache: KVCache,
        cache_rows: Sequence[int],
        starts: Sequence[int],
        *,
        num_layers: int | None = None,
        logit_slots: Sequence[int] | None = None,
    ) -> Tensor:
        """Runs one forward, as CachedLM.forward describes, without modules if no hook needs them."""
        if not self.weights.is_current:
            self.weights.bind()
            self._lean = None
        lean = self._lean_forward(cache, cache_rows)
        can_choose = logit_slots is not None and self._can_choose_logits
        with ExitStack() as stack:
            inputs = stack.enter_context(
                staged(cache, cache_rows, starts, token_ids.shape[1], self.model.config, self.n_ctx)
            )
            stack.enter_context(keeping_float64(self.dtype))
            token_ids = token_ids.to(self.device)
            if lean is not None:
                where = inputs["position_ids"], inputs["attention_mask"]
                return lean(token_ids, cache, *where, self._listeners, num_layers, logit_slots)
            stack.enter_context(attending(cache.reach, self.n_layers if num_layers is None else num_layers))
            out = self._run_modules(token_ids, inputs, num_layers, logit_slots if can_choose else None)
        return out if logit_slots is None or can_choose or num_layers is not None else out[:, list(logit_slots)]

    def _lean_forward(self, cache: KVCache, cache_rows: Sequence[int]) -> FunctionalForward | LeanGPT | None:
        """Returns the forward without modules; None if the family has none, or a hook or a head mask needs modules."""
        if self._lean_kind is None or not self._nothing_acts or cache.head_masks.concern(cache_rows):
            return None
        if self._lean is None:
            is_llama = self._lean_kind is FunctionalForward
            compiled = (self._compiled_block,) if is_llama else ()
            self._lean = self._lean_kind(self.model, self._product, *compiled)
        return self._lean

    def _run_modules(
        self, token_ids: Tensor, inputs: ForwardInputs, num_layers: int | None, logit_slots: Sequence[int] | None
    ) -> Tensor:
        """Runs the plain model: all blocks and the logits, of these slots if given; or the first `num_layers` blocks
        alone."""
        if num_layers is None:
            extra = (
                {} if logit_slots is None else {"logits_to_keep": torch.tensor(list(logit_slots), device=self.device)}
            )
            return self.model(token_ids, use_cache=True, **inputs, **extra).logits
        with self._stop_after(num_layers):
            try:
                self.model(token_ids, use_cache=True, **inputs)
            except _Stopped as stopped:
                return stopped.residual
        raise ModelError(f"{self.name} did not reach block {num_layers}")

    @contextmanager
    def _stop_after(self, num_layers: int) -> Iterator[None]:
        """Ends a forward after that many blocks. Enter it last, so that the capture hooks at that block run first."""

        def stop(value: Tensor) -> None:
            """Ends the forward with this residual stream."""
            raise _Stopped(value)

        handle = _listen(self._places[("pre", 0) if num_layers == 0 else ("S", num_layers - 1)], stop)
        try:
            yield
        finally:
            handle.remove()

    @cached_property
    def _can_choose_logits(self) -> bool:
        return "logits_to_keep" in inspect.signature(type(self.model).forward).parameters

    @contextmanager
    def capturing(self, sites: Sequence[tuple[str, int]], sink: StateSink) -> Iterator[None]:
        """Calls `sink` with activations inside the `with`, as CachedLM.capturing describes; then removes only the hooks
        added here."""
        missing = [place for place in sites if place not in self._places and place[0] not in HEAD_SITES]
        if missing:
            raise ModelError(f"{self.name} has no site {missing[0][0]} at layer {missing[0][1]}")
        with computing, ExitStack() as stack:
            for site, layer in sites:
                hear: Callable[[Tensor], object] = partial(sink, site, layer)
                if site in HEAD_SITES:
                    place, cut = self._head_place(site, layer)
                    hear = partial(_hear_cut, hear, cut)
                else:
                    place = self._places[site, layer]
                    self._listeners.setdefault((site, layer), []).append(hear)
                    stack.callback(self._forget, (site, layer), hear)
                stack.callback(_listen(place, hear).remove)
            yield

    @property
    def _nothing_acts(self) -> bool:
        """Whether the only hooks are capture hooks at sites that the forward without modules also reports."""
        num_hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in self._modules)
        return num_hooks == sum(map(len, self._listeners.values()))

    def _forget(self, place: tuple[str, int], hear: Callable[[Tensor], object]) -> None:
        self._listeners[place].remove(hear)
        if not self._listeners[place]:
            del self._listeners[place]

    @contextmanager
    def editing(self, sites: Sequence[tuple[str, int]], edit: StateEdit) -> Iterator[None]:
        """Lets `edit` replace activations inside the `with`, as CachedLM.editing describes; then removes only the hooks
        added here."""

        def change(site: str, layer: int, value: Tensor) -> Tensor | None:
            """Calls `edit`; z of the heads is split by head before and joined after the call."""
            if site != HEADS:
                return edit(site, layer, value)
            edited = edit(site, layer, value.unflatten(-1, self.head_shape))
            return None if edited is None else edited.flatten(-2)

        points = self.origin.bridge.hook_dict
        with computing, ExitStack() as stack:
            for site, layer in sites:
                name = hook_name(site, layer)
                if name not in points:
                    raise ModelError(f"{self.name} has no hook {name}")
                handle = _change(self._place(points, name), partial(change, site, layer))
                stack.callback(handle.remove)
            yield

    def fingerprint(self) -> dict[str, str | int | float]:
        """Returns the bridge's fingerprint with the entries that differ here: the path and the attention in use."""
        compiled = self.origin.compiled
        return {
            **self.origin.fingerprint(),
            "path": "fast",
            "attention": BY_REQUEST if self.attends_by_request else "sdpa",
            "products_in_float32": widening(None if compiled else self._wide_rows),
            **({"products_compiled": compiled.product.digest} if compiled else {}),
            **({"norms_compiled": self._compiled_block.digest} if self._compiled_block else {}),
        }

    @property
    def attends_by_request(self) -> bool:
        """Whether attention runs request by request, over slots chosen by position (see CachedLM)."""
        return self.model.config._attn_implementation == ATTENTION

    # read from the bridge
    name = property(attrgetter("origin.name"))
    weights_note = property(attrgetter("origin.weights_note"))
    n_layers = property(attrgetter("origin.n_layers"))
    d_model = property(attrgetter("origin.d_model"))
    d_vocab = property(attrgetter("origin.d_vocab"))
    n_ctx = property(attrgetter("origin.n_ctx"))
    head_shape = property(attrgetter("origin.head_shape"))
    compiled = property(attrgetter("origin.compiled"))
    dtype = property(attrgetter("origin.dtype"))
    device = property(attrgetter("origin.device"))
    tokenizer = property(attrgetter("origin.tokenizer"))
    stop_token_ids = property(attrgetter("origin.stop_token_ids"))
    new_cache = property(attrgetter("origin.new_cache"))
    injected_layers = property(attrgetter("origin.injected_layers"))
    check_settings = property(attrgetter("origin.check_settings"))
    unembedding = property(attrgetter("origin.unembedding"))
    output_parts = property(attrgetter("origin.output_parts"))
    head_writer = property(attrgetter("origin.head_writer"))
    read_out = property(attrgetter("origin.read_out"))
    read_out_with_gradients = property(attrgetter("origin.read_out_with_gradients"))
    encode = property(attrgetter("origin.encode"))
    decode = property(attrgetter("origin.decode"))
    token_texts = property(attrgetter("origin.token_texts"))
    to_activation_cache = property(attrgetter("origin.to_activation_cache"))


class _Stopped(Exception):
    """Ends a forward early; carries the residual stream at that block."""

    def __init__(self, residual: Tensor) -> None:
        super().__init__()
        self.residual = residual


def _linear_by(product: Product, module: nn.Linear, values: Tensor) -> Tensor:
    return product(values, module.weight, module.bias)


def _norm_by(block: CompiledBlock, module: LiveModule, values: Tensor) -> Tensor:
    return block.rms_norm(values, module.weight, module.variance_epsilon)


def _hear_cut(hear: Callable[[Tensor], object], cut: Cut, value: Tensor) -> None:
    hear(cut(value))


def _listen(place: Place, hear: Callable[[Tensor], object]) -> RemovableHandle:
    """Registers a hook that calls `hear` with a module's input or output; the hook changes no values."""
    module, point = place
    if point == OUTPUT_POINT:

        def on_output(module: nn.Module, args: tuple[ModuleValue, ...], output: ModuleValue) -> None:
            """Passes the module's output to `hear`."""
            hear(output[0] if isinstance(output, tuple) else output)

        return module.register_forward_hook(on_output)

    def on_input(module: nn.Module, args: tuple[ModuleValue, ...], kwargs: dict[str, ModuleValue]) -> None:
        """Passes the module's input to `hear`."""
        hear(args[0] if args else kwargs["hidden_states"])

    return module.register_forward_pre_hook(on_input, with_kwargs=True)


def _change(place: Place, edit: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
    """Registers a hook that lets `edit` replace a module's input or output."""
    module, point = place
    if point == OUTPUT_POINT:

        def on_output(module: nn.Module, args: tuple[ModuleValue, ...], output: ModuleValue) -> ModuleValue:
            """Returns the edited output, None if unchanged."""
            if not isinstance(output, tuple):
                return edit(output)
            edited = edit(output[0])
            return None if edited is None else (edited, *output[1:])

        return module.register_forward_hook(on_output)

    def on_input(module: nn.Module, args: tuple[ModuleValue, ...], kwargs: dict[str, ModuleValue]) -> _Inputs | None:
        """Returns the edited input, None if unchanged."""
        edited = edit(args[0] if args else kwargs["hidden_states"])
        if edited is None:
            return None
        return ((edited, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": edited})

    return module.register_forward_pre_hook(on_input, with_kwargs=True)
