"""Finds the module of the plain Hugging Face model that computes a site, and how to split the module's tensor by head
for q, k, v and z."""

from functools import partial

import torch
from torch import Tensor

from cacheprobe.core.hook_names import HEADS, INPUT_POINT, OUTPUT_POINT, PATTERN, hook_name
from cacheprobe.core.live import LiveModule
from cacheprobe.models.base import ModelError
from cacheprobe.models.fast.module_hooks import Cut, ModulePoint
from cacheprobe.models.hf.bridge import BridgeLM
from cacheprobe.models.hf.hooked import HookPoint
from cacheprobe.models.hf.shared import WRAPPED, SharedWeights
from cacheprobe.models.output_parts import output_rows

_PARTS = ("q", "k", "v")
_JOINT = "qkv"
"""The bridge's name for one joint projection of q, k and v."""


class Places:
    """Finds, by the bridge's hook names, the modules of the plain Hugging Face model that compute the sites."""

    def __init__(self, origin: BridgeLM, weights: SharedWeights) -> None:
        """Finds the modules of sites pre, S, T and C at all layers. Raises: ModelError if the hook of a site matches no
        module of the plain model."""
        self._origin, self._weights = origin, weights
        points = origin.bridge.hook_dict  # made anew at every access
        self.of_sites: dict[tuple[str, int], ModulePoint] = {
            (site, layer): self._place(points[hook_name(site, layer)], hook_name(site, layer))
            for layer in range(origin.n_layers)
            for site in ("pre", "S", "T", "C")
        }

    def of_hook(self, site: str, layer: int) -> ModulePoint:
        """Returns (module of the plain model, side) at which the bridge's hook of a site reads. Raises: ModelError if
        there is no such hook or module."""
        return self._place(self._point(site, layer), hook_name(site, layer))

    def of_heads(self, site: str, layer: int) -> tuple[ModulePoint, Cut]:
        """Returns ((module, side), cut): the module input or output of the plain model that holds site q, k, v or z of
        a layer, and the function that splits this tensor into heads.

        Raises: ModelError for the site of attention patterns, which only the bridge has, and if no hook or no module of
        the plain model belongs to the site.
        """
        if site == PATTERN:
            raise ModelError(
                f"{self._origin.name}: only the bridge has a hook on attention patterns; use path='auto' or 'bridge'"
            )
        point = self._point(site, layer)
        try:
            return self._place(point, hook_name(site, layer)), head_cut(self._origin, site, layer)
        except ModelError:
            path, cut = joint_place(self._origin, self._weights, site, layer)
            return (self._weights.plain.get_submodule(path), OUTPUT_POINT), cut

    def _point(self, site: str, layer: int) -> HookPoint:
        points, name = self._origin.bridge.hook_dict, hook_name(site, layer)
        if name not in points:
            raise ModelError(f"{self._origin.name} has no hook {name}")
        return points[name]

    def _place(self, point: HookPoint, name: str) -> ModulePoint:
        """Returns (module of the plain model, side) of a hook point of the bridge. Raises: ModelError if the hook point
        belongs to no module of the plain model."""
        component, _, end = str(point.name).rpartition(".")
        original = self._origin.bridge.get_submodule(component)._modules.get(WRAPPED)
        path = self._weights.path_of(original)
        if path is None or end not in (INPUT_POINT, OUTPUT_POINT):
            raise ModelError(
                f"{self._origin.name}: {name} is read at {point.name}, which is no module of the plain model"
            )
        return self._weights.plain.get_submodule(path), end


def head_cut(origin: BridgeLM, site: str, layer: int) -> Cut:
    """Returns the function that splits a module's tensor [b, t, w] for site q, k, v or z into heads [b, t, h, d]."""
    (heads, _), (kv_heads, key_width, value_width) = origin.head_shape, origin.layer_shapes[layer]
    shapes = {"q": (heads, key_width), "k": (kv_heads, key_width), "v": (kv_heads, value_width)}
    return partial(_unflatten, {**shapes, HEADS: (heads, value_width)}[site])


def joint_place(origin: BridgeLM, weights: SharedWeights, site: str, layer: int) -> tuple[str, Cut]:
    """Returns (path of the plain model's joint projection of q, k and v; function that extracts `site`, one of the
    three, from its output).

    Finds the layout by comparing the joint weight with the weight that the bridge split off: all of q, then k, then v
    (GPT-2), or q, k and v of each head together (GPT-NeoX).
    Raises: ModelError if there is no joint projection, or for an unknown layout.
    """
    attention: LiveModule = origin.bridge.blocks[layer].attn
    joint = attention._modules.get(_JOINT)
    path = None if joint is None else weights.path_of(joint._modules.get(WRAPPED))
    if path is None or site not in _PARTS:
        raise ModelError(f"{origin.name}: {hook_name(site, layer)} is read at no module of the plain model")
    whole = output_rows(weights.plain.get_submodule(path))
    own = output_rows(getattr(attention, site)._modules[WRAPPED])
    heads, width = origin.head_shape
    part_index = _PARTS.index(site)
    if whole.shape[0] == 3 * heads * width and own.shape == (heads * width, whole.shape[1]):
        if torch.equal(whole.reshape(3, heads, width, -1)[part_index].flatten(0, 1), own):
            return path, partial(_third, (3, heads, width), 2, part_index)
        if torch.equal(whole.reshape(heads, 3, width, -1)[:, part_index].flatten(0, 1), own):
            return path, partial(_third, (heads, 3, width), 3, part_index)
    raise ModelError(f"{origin.name}: {path} of the plain model holds q, k and v in an order that is not known here")


def _unflatten(shape: tuple[int, int], value: Tensor) -> Tensor:
    return value.unflatten(-1, shape)


def _third(shape: tuple[int, int, int], dim: int, part_index: int, value: Tensor) -> Tensor:
    return value.unflatten(-1, shape).select(dim, part_index)
