"""Runs a plain copy of the transformers model inside a TransformerBridge, with the operations that compute it fastest.

Hooks on the bridge have no effect on this forward; `models.paths` decides which of the two runs.
"""

from functools import partial
from operator import attrgetter

import torch
from torch import Tensor, nn

from cacheprobe.core.hook_names import INPUT_POINT, OUTPUT_POINT, PATTERN, hook_name
from cacheprobe.core.live import LiveModule
from cacheprobe.kvcache.staged import StagedCache
from cacheprobe.models.base import HeadWriter, ModelError, OutputParts
from cacheprobe.models.experts import use_invariant_experts
from cacheprobe.models.fast.functional import FunctionalForward, FunctionalGPT, FunctionalLlama, affine
from cacheprobe.models.fast.operations import (
    KernelOperations,
    Operations,
    Product,
    QueuedOperations,
    is_silu,
    replace_forward,
)
from cacheprobe.models.fast.prepared import PreparedOperations
from cacheprobe.models.hf.attention import Attend
from cacheprobe.models.hf.bridge import BridgeLM
from cacheprobe.models.hf.shared import WRAPPED, SharedWeights
from cacheprobe.models.plain.lm import CopiedLM
from cacheprobe.models.plain.sites import HeadCut, ModulePoint, by_head
from cacheprobe.models.plain.structure import AddedPart, PlainBlock
from cacheprobe.models.weights import ROTATIONS_OF_PASSES, is_conv, output_rows
from cacheprobe.ops.attention import BY_REQUEST
from cacheprobe.ops.compiled.attention import MOST_TOKENS
from cacheprobe.ops.compiled.lanes import FORMATS
from cacheprobe.ops.compiled.operations import TORCH, CompiledOperations
from cacheprobe.ops.kernel_set import KernelSet

FUNCTIONAL = (FunctionalLlama, FunctionalGPT)
"""Classes that compute a forward without calling modules; each supports some model families."""

_PARTS = ("q", "k", "v")
_JOINT = "qkv"
"""The bridge's name for one joint projection of q, k and v."""


def _of_origin(name: str) -> property:
    """Returns a property that reads an attribute of the BridgeLM at every access, since users may set it there. The
    value that the base class's constructor gives is dropped."""
    return property(lambda model: getattr(model.origin, name), lambda model, value: None)


class FastLM(CopiedLM):
    """Runs a plain copy of the transformers model inside a bridge, which shares the weights of the bridge's model. This
    is the fast forward. The modules of its states are those to which the bridge's hook names belong.

    Twin: BridgeLM: logits, S, T, C, keys and values close(1e-4) in float32, since fused attention reorders sums.
    """

    operations = property(attrgetter("origin.operations"))  # pyright: ignore[reportAssignmentType]
    tokenizer = _of_origin("tokenizer")  # pyright: ignore[reportAssignmentType]
    stop_token_ids = _of_origin("stop_token_ids")  # pyright: ignore[reportAssignmentType]
    stop_source = _of_origin("stop_source")  # pyright: ignore[reportAssignmentType]
    prepend_bos = _of_origin("prepend_bos")  # pyright: ignore[reportAssignmentType]
    weights_checksum = _of_origin("weights_checksum")  # pyright: ignore[reportIncompatibleMethodOverride]
    weights_sha256 = _of_origin("weights_sha256")  # pyright: ignore[reportIncompatibleMethodOverride]

    def __init__(self, origin: BridgeLM, functional: bool = True) -> None:
        """Builds the plain model around the weights of the BridgeLM `origin`. functional: compute without modules in
        forwards that `_functional_forward` allows; False calls the modules. Results have the same bits either way.

        Raises: ModelError if the bridge's weights were processed, or if a hook of the bridge matches no module of the
        model.
        """
        if origin.is_processed:
            raise ModelError(f"{origin.name}: the bridge's weights were processed (compatibility mode)")
        super().__init__(origin.live, origin.tokenizer, origin.name, origin.weights_note)
        self.origin = origin
        self.n_layers, self.d_model, self.d_vocab = origin.n_layers, origin.d_model, origin.d_vocab
        self.n_ctx, self.head_shape, self.adapter = origin.n_ctx, origin.head_shape, origin.adapter
        self.head, self.hooked_module = origin.head, origin.bridge
        self.layer_shapes, self.layer_devices = origin.cache_layers()
        self.blocks = [self._block(layer) for layer in range(self.n_layers)]
        self._functional_class = next((kind for kind in FUNCTIONAL if kind.takes(self.model)), None)
        self._operations = self._choose_operations()
        self.mixtures = use_invariant_experts(self.model, None if self.operations is None else self.operations.product)
        self._is_functional = functional
        self._functional: FunctionalForward | None = None
        self._modules = list(self.model.modules())

    def _choose_operations(self) -> Operations:
        """Returns the operations of the forward, and makes the plain model's modules compute with them."""
        faster = self.operations
        if faster is None:
            return Operations()
        for module in self.model.modules():
            if type(module) is nn.Linear or is_conv(module):
                vars(module)["forward"] = partial(_linear_by, faster.product, module)
        operations: Operations = Operations(faster.product)
        if isinstance(faster, KernelSet) and self._functional_class is not None:
            operations = by_module = KernelOperations(faster, self.model.config, self.n_layers)
        elif isinstance(faster, CompiledOperations) and self._functional_class is FunctionalLlama:
            by_module = QueuedOperations(faster.product, self.dtype)
            operations = PreparedOperations(faster.product, self.dtype)
        else:
            return operations
        for module in self.model.modules():
            replace_forward(module, by_module)
        return operations

    def _rebind(self) -> None:
        super()._rebind()
        self._functional = None

    def _functional_forward(self, cache: StagedCache) -> FunctionalForward | None:
        """Returns the FunctionalForward, which calls no modules; None if the pass needs the modules."""
        if self._functional_class is None or not self._is_functional:
            return None
        if not self._has_capture_hooks_only or cache.cache.head_masks.concern(cache.rows):
            return None
        if self._functional is None:
            self._functional = self._functional_class(self.model, self._operations)
        return self._functional

    def _attend(self, cache: StagedCache) -> Attend | None:
        operations = self._operations
        return (
            partial(operations.attend, cache) if isinstance(operations, KernelOperations) and cache.is_written else None
        )

    @property
    def _has_capture_hooks_only(self) -> bool:
        """True if all PyTorch hooks on the plain model are capture hooks at sites pre, S, T and C."""
        num_hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in self._modules)
        return num_hooks == sum(map(len, self.listeners.values()))

    def _block(self, layer: int) -> PlainBlock:
        """Returns where the states of a block are. Raises: ModelError if a hook of the bridge is read elsewhere than at
        the block's input or output, or at the output of a module."""
        found = [self._path(site, layer) for site in ("pre", "S", "T", "C")]
        (entry, _), (block, _), (attended, _), (mlp, _) = found
        if entry != block or [side for _, side in found] != [INPUT_POINT, *[OUTPUT_POINT] * 3]:
            raise ModelError(f"{self.name}: the bridge reads states of block {layer} at places that are not known here")
        return PlainBlock(block, "", "", (AddedPart(attended, 1.0),), (AddedPart(mlp, 1.0),))

    def _path(self, site: str, layer: int) -> tuple[str, str]:
        """Returns (path of the module of the plain model, side) at which the bridge's hook of a site reads. Raises:
        ModelError if there is no such hook or module."""
        points, name = self.origin.bridge.hook_dict, hook_name(site, layer)
        if name not in points:
            raise ModelError(f"{self.name} has no hook {name}")
        component, _, end = str(points[name].name).rpartition(".")
        path = self.weights.path_of(self.origin.bridge.get_submodule(component)._modules.get(WRAPPED))
        if path is None or end not in (INPUT_POINT, OUTPUT_POINT):
            raise ModelError(
                f"{self.name}: {name} is read at {points[name].name}, which is no module of the plain model"
            )
        return path, end

    def _heads(self, site: str, layer: int) -> tuple[ModulePoint, HeadCut]:
        """Returns (module and side, function that splits its tensor into heads) of site q, k, v or z of a layer.

        Raises: ModelError for the site of attention patterns, which only the bridge has, and if no hook or no module of
        the plain model belongs to the site.
        """
        if site == PATTERN:
            raise ModelError(
                f"{self.name}: only the bridge has a hook on attention patterns; use path='auto' or 'bridge'"
            )
        shape = self._shape_of_heads(site, layer, -1)  # as many as there are: layers may differ
        try:
            path, side = self._path(site, layer)
            assert shape is not None
            return (self._module(path), side), partial(by_head, shape)
        except ModelError:
            path, cut = _joint_projection(self.origin, self.weights, site, layer)
            return (self._module(path), OUTPUT_POINT), cut

    def head_writer(self, layer: int) -> HeadWriter:
        """Returns the steps from one layer's attention heads to the residual stream, as BridgeLM.head_writer."""
        return self.origin.head_writer(layer)

    def output_parts(self) -> OutputParts:
        """Returns the steps from the last residual stream to the logits, as BridgeLM.output_parts."""
        return self.origin.output_parts()

    def fingerprint_of_path(self) -> dict[str, str | int | float]:
        """Returns what a fingerprint says of this path: its name, its attention, and what else it depends on."""
        attention = BY_REQUEST if self.attends_by_request else "sdpa"
        if isinstance(self._operations, KernelOperations):
            attention = f"all slots up to the token's, {self._operations.kernels.text}"
        return {
            **self.origin.fingerprint_of_path(),
            "path": "fast",
            "attention": attention,
            "products": self.operations.text if self.operations else TORCH,
        }

    @property
    def independent_width(self) -> int:
        """Largest width, in tokens, up to which no result for a token depends, by construction, on the width of a pass
        or on its other requests: compiled loops or kernels compute products, norms, attention and activations. 0 if
        there is none. In wider passes torch computes the attention, by request, in calls whose shape has the width."""
        if self._functional_class is not FunctionalLlama or not self.attends_by_request:
            return 0
        if getattr(self.model.model.rotary_emb, "rope_type", "default") in ROTATIONS_OF_PASSES:
            return 0
        if isinstance(self._operations, KernelOperations):
            return self.n_ctx if self.device.type == "cuda" else 0  # elsewhere torch's loops compute the activation
        is_in_loops = isinstance(self._operations, QueuedOperations)
        is_in_loops &= all(is_silu(layer.mlp.act_fn) for layer in self.model.model.layers)
        return MOST_TOKENS[FORMATS[self.dtype]] if is_in_loops else 0


def _linear_by(product: Product, module: LiveModule, values: Tensor) -> Tensor:
    return product(values, *affine(module))


def _joint_projection(origin: BridgeLM, weights: SharedWeights, site: str, layer: int) -> tuple[str, HeadCut]:
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


def _third(shape: tuple[int, int, int], dim: int, part_index: int, value: Tensor) -> Tensor:
    return value.unflatten(-1, shape).select(dim, part_index)
