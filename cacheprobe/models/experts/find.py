"""Finds the routers and the experts of a transformers model."""

import re
from typing import NamedTuple

from torch import nn

from cacheprobe.core.live import LiveModule

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
