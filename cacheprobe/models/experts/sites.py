"""Finds the mixtures of experts of a transformers model, makes them batch-invariant, and reads and edits their routing:
the site "router"."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from cacheprobe.core.hook_names import RECURRENT, ROUTER
from cacheprobe.core.live import LiveConfig, LiveModule, ModuleValue
from cacheprobe.models.base import CachedLM, ModelError, StateEdit, StateSink
from cacheprobe.models.experts.dispatch import INVARIANT, PRODUCT, RowProduct, padded, product_of

_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
_TOP_K = ("num_experts_per_tok", "top_k_experts")
_WRAPPED = "_original_component"
"""The name under which a TransformerBridge keeps a module that it replaced."""


class MixtureLayer(NamedTuple):
    """Holds the modules of one mixture of experts."""

    block: LiveModule
    """The module that holds router and experts; its input is [b, t, m]."""
    experts: LiveModule
    """The experts, called with states [n, m], expert ids [n, k] and weights [n, k]."""
    router: LiveModule | None
    """Computes logits [n, e] by one linear product, then ids and weights. None if the block computes the routing
    itself."""
    num_experts: int
    top_k: int
    """Number of experts that compute each token."""


def mixture_layers(model: LiveModule) -> dict[int, MixtureLayer]:
    """Returns a dict layer -> MixtureLayer of the layers of a transformers model whose experts are chosen by
    transformers' table of experts functions; {} for a dense model. A bridge around parts of the model is looked
    through."""
    found: dict[int, MixtureLayer] = {}
    for path, module in model.named_modules():
        layer = _LAYER.search(f".{path}.")
        if layer is None or path.endswith(_WRAPPED) or not _are_experts(module := _inner(module)):
            continue
        block = _inner(model.get_submodule(path.rpartition(".")[0]))
        router = next((_inner(child) for child in block.children() if _is_router(_inner(child), module)), None)
        config = module.config
        top_k = next(filter(None, (getattr(router, "top_k", 0), *(getattr(config, name, 0) for name in _TOP_K))), 0)
        found[int(layer[1])] = MixtureLayer(block, module, router, int(module.num_experts), int(top_k))
    return dict(sorted(found.items()))


def _inner(module: LiveModule) -> LiveModule:
    """Returns the module inside a bridge's wrappers; another module unchanged."""
    while _WRAPPED in module._modules:
        module = module._modules[_WRAPPED]
    return module


def _are_experts(module: LiveModule) -> bool:
    """Whether a module's forward looks up transformers' table of experts functions."""
    return all(hasattr(module, name) for name in ("is_transposed", "has_gate", "_apply_gate", "num_experts"))


def _is_router(module: LiveModule, experts: LiveModule) -> bool:
    """Whether a module has one weight [e, m] and computes ids and weights in its own forward."""
    weight = module._parameters.get("weight")
    return not isinstance(module, nn.Linear) and weight is not None and weight.shape[:-1] == (experts.num_experts,)


LogitEdit: TypeAlias = Callable[[Tensor], Tensor | None]
"""Function of the router's logits [n, e]: returns the new logits, or None to leave them unchanged."""


class RouterForward:
    """Replaces the forward of a router. Runs the router's own code, in which the linear product and the sigmoid are
    batch-invariant, and edits the logits that the product gives.

    Twin: the router's own forward, the same ids, weights close(1e-5) in float32.
    """

    def __init__(self, router: nn.Module, product: RowProduct) -> None:
        self.router, self.product = router, product
        self.edits: list[LogitEdit] = []

    def __call__(self, *args: ModuleValue, **kwargs: ModuleValue) -> ModuleValue:
        """Returns what the router's own forward returns."""
        with _RouterFunctions(self):
            return type(self.router).forward(self.router, *args, **kwargs)

    def logits(self, values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns the logits [..., e] of values [..., m], after the edits."""
        logits = self.product(values.reshape(-1, values.shape[-1]), weight, bias)
        for edit in self.edits:
            edited = edit(logits)
            logits = logits if edited is None else edited
        return logits.view(*values.shape[:-1], -1)


class _RouterFunctions(TorchFunctionMode):
    """Replaces torch's functions `linear` and `sigmoid` while one router runs."""

    def __init__(self, forward: RouterForward) -> None:
        super().__init__()
        self.forward = forward

    def __torch_function__(
        self,
        func: Callable[..., ModuleValue],
        types: object,
        args: tuple[ModuleValue, ...] = (),
        kwargs: dict[str, ModuleValue] | None = None,
    ) -> ModuleValue:
        """Returns the result of torch's function `func`, or of its replacement."""
        kwargs = kwargs or {}
        if func is linear:
            return self.forward.logits(*args, **kwargs)
        if func in (torch.sigmoid, Tensor.sigmoid, torch.nn.functional.sigmoid) and args[0].dim() == 2:
            return padded(torch.sigmoid, args[0])
        return func(*args, **kwargs)


def forward_of(router: LiveModule) -> RouterForward | None:
    """Returns the RouterForward that replaces a router's forward; None if nothing was replaced."""
    found = vars(router).get("forward")
    return found if isinstance(found, RouterForward) else None


EXPERTS = "one product a token, ascending ids"
"""How experts are computed, as a fingerprint says it."""


def use_invariant_experts(model: LiveModule, product: RowProduct | None) -> dict[int, MixtureLayer]:
    """Makes the mixtures of experts of a transformers model batch-invariant, in place, and returns them by layer. Does
    nothing to a dense model.

    product: computes products batch-invariantly, for tensors of the model's dtype; None for one product of torch for
    each token and expert.
    """
    layers = mixture_layers(model)
    for one in layers.values():
        of_any_dtype = product_of(product, next(one.experts.parameters()).dtype)
        one.experts.config._experts_implementation = INVARIANT
        vars(one.experts)[PRODUCT] = of_any_dtype
        if one.router is not None:
            vars(one.router)["forward"] = RouterForward(one.router, of_any_dtype)
    return layers


@contextmanager
def own_experts(mixtures: Mapping[int, MixtureLayer]) -> Iterator[None]:
    """Makes mixtures compute as their own classes do inside the `with`: the routers' forwards, and experts one after
    the other over all their tokens."""
    with ExitStack() as stack:
        for one in mixtures.values():
            config: LiveConfig = one.experts.config
            stack.callback(setattr, config, "_experts_implementation", config._experts_implementation)
            config._experts_implementation = "eager"
            if one.router is not None and (forward := vars(one.router).pop("forward", None)) is not None:
                stack.callback(vars(one.router).__setitem__, "forward", forward)
        yield


def layers_of(model: CachedLM) -> Mapping[int, MixtureLayer]:
    """Returns the mixtures of experts of a loaded model by layer; {} for a dense model."""
    return getattr(model, "mixtures", {})


def head_places(model: CachedLM, sites: Sequence[str], layers: Sequence[int]) -> list[tuple[str, int]]:
    """Returns the (site, layer) pairs of head sites at these layers, without routers of dense layers and states of
    layers that are not recurrent."""
    there = {ROUTER: layers_of(model), RECURRENT: state_shapes(model)}
    return [(site, layer) for layer in layers for site in sites if layer in there.get(site, layers)]


def state_shapes(model: CachedLM) -> Mapping[int, tuple[int, int]]:
    """Returns (heads, numbers of a head) of the recurrent state of a loaded model's recurrent layers; {} without one.
    A head is an index of the state's first axis: a head of Mamba 2 or Gated DeltaNet, a channel of Mamba."""
    return getattr(model, "state_shapes", {})


def split(places: Sequence[tuple[str, int]]) -> tuple[list[tuple[str, int]], list[int]]:
    """Returns (the places that are not routers, the layers of the routers)."""
    return [place for place in places if place[0] != ROUTER], [layer for site, layer in places if site == ROUTER]


@contextmanager
def capturing_routing(
    name: str, mixtures: Mapping[int, MixtureLayer], layers: Sequence[int], sink: StateSink
) -> Iterator[None]:
    """Inside the `with`, a forward calls `sink("router", layer, routing)`, with routing [b, t, k, 2] in float32: for
    each token, the id and the weight of its k experts, the largest weight first.

    Raises: ModelError for a layer without experts. name: of the model, for errors.
    """

    def keep(layer: int, shape: list[int], module: nn.Module, args: tuple[ModuleValue, ...]) -> None:
        """Calls the sink with the arguments of the experts."""
        expert_ids, weights = (value.reshape(-1, value.shape[-1]) for value in args[1:3])
        order = weights.argsort(dim=-1, descending=True, stable=True)
        routing = torch.stack([value.gather(1, order).float() for value in (expert_ids, weights)], dim=-1)
        sink(ROUTER, layer, routing.view(*shape, *routing.shape[1:]))

    with ExitStack() as stack:
        for layer in layers:
            one = _require(name, mixtures, layer)
            shape = _shape_of(one, stack)
            stack.callback(one.experts.register_forward_pre_hook(partial(keep, layer, shape)).remove)
        yield


@contextmanager
def editing_routers(
    name: str, mixtures: Mapping[int, MixtureLayer], layers: Sequence[int], edit: StateEdit
) -> Iterator[None]:
    """Inside the `with`, a forward calls `edit("router", layer, logits)` with a router's logits [b, t, e]. A returned
    tensor replaces them, before the experts are chosen.

    Raises: ModelError for a layer without a router. name: of the model, for errors.
    """

    def edited(layer: int, shape: list[int], logits: Float[Tensor, "n e"]) -> Tensor | None:
        """Returns the edited logits; None if `edit` returns None."""
        made = edit(ROUTER, layer, logits.view(*shape, -1))
        return None if made is None else made.view(logits.shape)

    with ExitStack() as stack:
        for layer in layers:
            one = _require(name, mixtures, layer)
            forward = None if one.router is None else forward_of(one.router)
            if forward is None:
                raise ModelError(f"{name}: the mixture of layer {layer} computes its routing itself; it has no router")
            shape = _shape_of(one, stack)
            own = partial(edited, layer, shape)
            forward.edits.append(own)
            stack.callback(forward.edits.remove, own)
        yield


def _require(name: str, mixtures: Mapping[int, MixtureLayer], layer: int) -> MixtureLayer:
    """Returns the mixture of a layer. Raises: ModelError if the layer is dense."""
    if layer not in mixtures:
        there = f"there are some at layers {', '.join(map(str, mixtures))}" if mixtures else "the model is dense"
        raise ModelError(f"{name} has no mixture of experts at layer {layer}; {there}")
    return mixtures[layer]


def _shape_of(one: MixtureLayer, stack: ExitStack) -> list[int]:
    """Returns a list that holds [b, t] of the pass that runs, from the input of the mixture's block."""
    shape: list[int] = []

    def note(module: nn.Module, args: tuple[ModuleValue, ...], kwargs: dict[str, ModuleValue]) -> None:
        """Takes the shape from the block's input [b, t, m]."""
        shape[:] = (args[0] if args else kwargs["hidden_states"]).shape[:-1]

    stack.callback(one.block.register_forward_pre_hook(note, with_kwargs=True).remove)
    return shape
