"""Finds the mixtures of experts of a transformers model, makes them batch-invariant, and reads and edits their routing:
the site "router".

transformers calls `invariant_experts` if a config's `_experts_implementation` is INVARIANT: each token's experts in the
order of their ids, each by a product whose bits do not depend on the other tokens. transformers' own functions compute
all tokens of an expert in one product, whose bits depend on the number of these tokens.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from cacheprobe.core.hook_names import RECURRENT, ROUTER
from cacheprobe.core.live import LiveConfig, LiveModule, ModuleValue
from cacheprobe.models.base import CachedLM, ModelError, StateEdit, StateSink
from cacheprobe.models.settings import FunctionMode
from cacheprobe.models.weights import WRAPPED

RowProduct = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Function (values, weight, bias) -> values weight^T + bias."""

_NUMBERS_AT_ONCE = 2**15 - 1
"""torch computes so many numbers in one thread, without a split at a place that depends on their number."""
_EVEN = 64
"""Numbers of a loop step of torch in 16 bits. The rest of a loop has other code, and may get other bits."""


def rows_alone(values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns values weight^T + bias, [n, o], from values [n, i]: one product for each of the n rows. Each row is
    copied, because a library may use other code for another memory address."""
    if not len(values):
        return linear(values, weight, bias)
    return torch.cat([linear(row.clone()[None], weight, bias) for row in values])


def in_even_parts(f: Callable[[Tensor], Tensor], values: Tensor, parts: int = 1) -> Tensor:
    """Returns f(values) of values [n, w], for a function that treats each row alike. On a CPU computes as many rows at
    once as give the same bits as one: all steps of torch's loops are whole, or there is one row.

    parts: a row consists of so many parts of equal width, from which `f` computes element by element.
    """
    n, width = values.shape
    if values.device.type != "cpu" or n <= 1:
        return f(values)
    at_once = max(1, _NUMBERS_AT_ONCE // width) if width % (parts * _EVEN) == 0 else 1
    return torch.cat([f(part.clone()) for part in values.split(at_once)])


def padded(f: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """Returns f(values) of values [n, w], for a function of each number, as `in_even_parts` on rows with zeros at their
    end."""
    return in_even_parts(f, pad(values, (0, -values.shape[-1] % _EVEN)))[:, : values.shape[-1]]


INVARIANT = "cacheprobe"
"""Our name in transformers' table of experts functions."""
PRODUCT = "_cacheprobe_product"
"""Name under which a module keeps the product to compute with; without one, `rows_alone`."""


def invariant_experts(experts: LiveModule, states: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
    """Returns, for states [n, m], the sum of the outputs of each token's k experts, times their weights: [n, m].

    expert_ids, weights: [n, k]. The sum is in float32 (in float64 for a float64 model), in ascending order of the ids.
    Twin: the forward of the experts' own class in transformers, close(1e-5) in float32: sums are in another order.
    """
    width, top_k = states.shape[-1], expert_ids.shape[-1]
    flat = states.reshape(-1, width)
    expert_ids, order = expert_ids.reshape(-1, top_k).sort(dim=-1, stable=True)
    weights = weights.reshape(-1, top_k).gather(1, order)
    pairs = expert_ids.flatten()
    outputs = flat.new_zeros(len(pairs), width)
    for expert in pairs.unique().tolist():
        if expert < experts.num_experts:  # a number beyond them says "none"
            rows = (pairs == expert).nonzero()[:, 0]
            outputs[rows] = _output(experts, expert, flat[rows // top_k])
    weighted = outputs.view(-1, top_k, width) * weights[..., None]
    weighted = weighted.to(torch.promote_types(states.dtype, torch.float32))
    total = weighted[:, 0]
    for rank in range(1, top_k):
        total = total + weighted[:, rank]
    return total.to(states.dtype).view(states.shape)


def _output(experts: LiveModule, expert: int, states: Tensor) -> Tensor:
    """Returns the output [n, m] of one expert for states [n, m]."""
    product: RowProduct = vars(experts).get(PRODUCT, rows_alone)
    name = "gate_up_proj" if experts.has_gate else "up_proj"
    inner = product(states, *_layer(experts, name, expert))
    activate = experts._apply_gate if experts.has_gate else experts.act_fn
    inner = in_even_parts(activate, inner, parts=2 if experts.has_gate else 1)
    output = product(inner, *_layer(experts, "down_proj", expert))
    has_norm = getattr(experts, "has_post_expert_norm", False)
    return torch.cat([experts.post_expert_norm(row[None]) for row in output]) if has_norm else output


def _layer(experts: LiveModule, name: str, expert: int) -> tuple[Tensor, Tensor | None]:
    """Returns (weight [o, i], bias [o] or None) of one linear layer of one expert."""
    weight = getattr(experts, name)[expert]
    bias = getattr(experts, f"{name}_bias")[expert] if experts.has_bias else None
    return weight.T.contiguous() if experts.is_transposed else weight, bias


def _by_dtype(product: RowProduct, dtype: torch.dtype, values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns values weight^T + bias: by `product` for tensors of the model's dtype, by `rows_alone` for others."""
    return (product if values.dtype == weight.dtype == dtype else rows_alone)(values, weight, bias)


ALL_EXPERTS_FUNCTIONS.register(INVARIANT, invariant_experts)


_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
_TOP_K = ("num_experts_per_tok", "top_k_experts")


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
        if layer is None or path.endswith(WRAPPED) or not _are_experts(module := _inner(module)):
            continue
        block = _inner(model.get_submodule(path.rpartition(".")[0]))
        router = next((_inner(child) for child in block.children() if _is_router(_inner(child), module)), None)
        config = module.config
        top_k = next(filter(None, (getattr(router, "top_k", 0), *(getattr(config, name, 0) for name in _TOP_K))), 0)
        found[int(layer[1])] = MixtureLayer(block, module, router, int(module.num_experts), int(top_k))
    return dict(sorted(found.items()))


def _inner(module: LiveModule) -> LiveModule:
    """Returns the module inside a bridge's wrappers; another module unchanged."""
    while WRAPPED in module._modules:
        module = module._modules[WRAPPED]
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
        with FunctionMode(self._call):
            return type(self.router).forward(self.router, *args, **kwargs)

    def _call(
        self, func: Callable[..., ModuleValue], args: Sequence[ModuleValue], kwargs: Mapping[str, ModuleValue]
    ) -> ModuleValue:
        """Returns the result of a torch function, or of its replacement."""
        if func is linear:
            return self.logits(*args, **kwargs)
        if func in (torch.sigmoid, Tensor.sigmoid, torch.nn.functional.sigmoid) and args[0].dim() == 2:
            return padded(torch.sigmoid, args[0])
        return func(*args, **kwargs)

    def logits(self, values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns the logits [..., e] of values [..., m], after the edits."""
        logits = self.product(values.reshape(-1, values.shape[-1]), weight, bias)
        for edit in self.edits:
            edited = edit(logits)
            logits = logits if edited is None else edited
        return logits.view(*values.shape[:-1], -1)


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
        dtype = next(one.experts.parameters()).dtype
        of_any_dtype = rows_alone if product is None else partial(_by_dtype, product, dtype)
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
