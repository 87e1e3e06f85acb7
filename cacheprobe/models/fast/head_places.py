"""Finds the module of the plain model that computes q, k, v or z of its heads, and how to split that module's output by
head."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from cacheprobe.core.hook_names import HEADS, PATTERN, hook_name
from cacheprobe.core.live import LiveModule
from cacheprobe.models.base import ModelError
from cacheprobe.models.hf.bridge import BridgeLM
from cacheprobe.models.hf.shared import WRAPPED, SharedWeights

_PARTS = ("q", "k", "v")
_JOINT = "qkv"
"""The bridge's name for one joint projection of q, k and v."""

Cut = Callable[[Tensor], Tensor]
"""Splits a module's tensor [b, t, w] into a site's tensor [b, t, h, d]."""


def head_cut(origin: BridgeLM, site: str, layer: int) -> Cut:
    """Returns the function that splits the input or output of a projection that computes this site alone into heads."""
    (heads, _), (kv_heads, key_width, value_width) = origin.head_shape, origin.layer_shapes[layer]
    shapes = {"q": (heads, key_width), "k": (kv_heads, key_width), "v": (kv_heads, value_width)}
    return partial(_unflatten, {**shapes, HEADS: (heads, value_width)}[site])


def joint_place(origin: BridgeLM, weights: SharedWeights, site: str, layer: int) -> tuple[str, Cut]:
    """Returns the path of the plain model's joint q, k, v projection, and the function that extracts this site from its
    output.

    Finds the layout by comparing the joint weight with the weight that the bridge split off: all of q, then k, then v
    (GPT-2), or q, k and v of each head together (GPT-NeoX).
    Raises: ModelError if there is no joint projection, or for an unknown layout.
    """
    attention: LiveModule = origin.bridge.blocks[layer].attn
    joint = attention._modules.get(_JOINT)
    path = None if joint is None else weights.path_of(joint._modules.get(WRAPPED))
    if path is None or site not in _PARTS:
        raise ModelError(f"{origin.name}: {hook_name(site, layer)} is read at no module of the plain model")
    whole = _as_rows(weights.plain.get_submodule(path))
    own = _as_rows(getattr(attention, site)._modules[WRAPPED])
    heads, width = origin.head_shape
    number = _PARTS.index(site)
    if whole.shape[0] == 3 * heads * width and own.shape == (heads * width, whole.shape[1]):
        if torch.equal(whole.reshape(3, heads, width, -1)[number].flatten(0, 1), own):
            return path, partial(_third, (3, heads, width), 2, number)
        if torch.equal(whole.reshape(heads, 3, width, -1)[:, number].flatten(0, 1), own):
            return path, partial(_third, (heads, 3, width), 3, number)
    raise ModelError(f"{origin.name}: {path} of the plain model holds q, k and v in an order that is not known here")


def require_no_pattern(name: str, site: str) -> None:
    """Raises: ModelError for the site of attention patterns, which only the bridge has."""
    if site == PATTERN:
        raise ModelError(f"{name}: only the bridge has a hook on attention patterns; use path='auto' or 'bridge'")


def _as_rows(module: LiveModule) -> Tensor:
    """Returns a linear module's weight with one row for each output; Conv1D stores the transpose."""
    weight = module.weight.detach()
    return weight.T if type(module).__name__ == "Conv1D" else weight


def _unflatten(shape: tuple[int, int], value: Tensor) -> Tensor:
    return value.unflatten(-1, shape)


def _third(shape: tuple[int, int, int], dim: int, number: int, value: Tensor) -> Tensor:
    return value.unflatten(-1, shape).select(dim, number)
