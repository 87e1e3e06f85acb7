"""Runs the plain Hugging Face model as a CachedLM: fused attention, the bridge's own weights, the bridge's hook names.

Hooks on the bridge have no effect on this forward; `models.paths` decides which of the two forwards runs. Interventions
use hooks on this model.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from cacheprobe.core.hook_names import HEAD_SITES, HEADS
from cacheprobe.core.live import LiveModule
from cacheprobe.kvcache.cache import KVCache
from cacheprobe.kvcache.staged import PassAttention, StagedCache
from cacheprobe.models.base import ModelError, StateEdit, StateSink
from cacheprobe.models.experts.sites import capturing_routing, editing_routers, split, use_invariant_experts
from cacheprobe.models.facts import ROTATIONS_OF_PASSES
from cacheprobe.models.fast.bridge_members import BridgeMembers
from cacheprobe.models.fast.functional import FunctionalForward, FunctionalLlama, affine
from cacheprobe.models.fast.functional_gpt import FunctionalGPT
from cacheprobe.models.fast.kernel_operations import KernelOperations
from cacheprobe.models.fast.module_hooks import Cut, change, listen
from cacheprobe.models.fast.operations import Operations, Product
from cacheprobe.models.fast.places import Places
from cacheprobe.models.fast.prepared import PreparedOperations
from cacheprobe.models.fast.queued import QueuedOperations, is_silu, replace_forward
from cacheprobe.models.hf.attention import ATTENTION, attending
from cacheprobe.models.hf.bridge import BridgeLM
from cacheprobe.models.hf.cache import ForwardInputs, forward_inputs
from cacheprobe.models.hf.float64 import keeping_float64
from cacheprobe.models.hf.shared import SharedWeights, empty_model
from cacheprobe.models.output_parts import is_conv
from cacheprobe.models.turns import computing, one_at_a_time
from cacheprobe.ops.attention.by_request import BY_REQUEST
from cacheprobe.ops.compiled.attention import MOST_TOKENS
from cacheprobe.ops.compiled.choice import TORCH, CompiledOperations
from cacheprobe.ops.compiled.lanes import FORMATS
from cacheprobe.ops.kernel_set import KernelSet

FUNCTIONAL = (FunctionalLlama, FunctionalGPT)
"""Classes that compute a forward without calling modules; each supports some model families."""


class HookedHF(BridgeMembers):
    """Runs a plain copy of the Hugging Face model inside a bridge, which shares the weights of the bridge's model. This
    is the fast forward.

    Twin: BridgeLM: logits, S, T, C, keys and values close(1e-4) in float32, since fused attention reorders sums.
    """

    def __init__(self, origin: BridgeLM, functional: bool = True) -> None:
        """Builds the plain model around the weights of the BridgeLM `origin`. functional: compute without modules in
        forwards that `_functional_forward` allows; False calls the modules. Results have the same bits either way.

        Raises: ModelError if the bridge's weights were processed, or if a hook of the bridge matches no module of the
        model.
        """
        bridge = origin.bridge
        if bridge.compatibility_mode or getattr(bridge, "_weights_processed", False):
            raise ModelError(f"{origin.name}: the bridge's weights were processed (compatibility mode)")
        self.origin = origin
        self.model: LiveModule = empty_model(bridge.original_model)
        self.weights = SharedWeights(bridge.original_model, self.model)
        self._places = Places(origin, self.weights)
        self._functional_class = next((kind for kind in FUNCTIONAL if kind.takes(self.model)), None)
        self._operations = self._choose_operations()
        product = None if origin.operations is None else origin.operations.product
        self.mixtures = use_invariant_experts(self.model, product)
        self._is_functional = functional
        self._functional: FunctionalForward | None = None
        self._modules = list(self.model.modules())
        self._listeners: dict[tuple[str, int], list[Callable[[Tensor], object]]] = {}

    def __repr__(self) -> str:
        return f"HookedHF({repr(self.origin).removeprefix('BridgeLM(')}"

    def _choose_operations(self) -> Operations:
        """Returns the operations of the forward, and makes the plain model's modules compute with them."""
        faster = self.origin.operations
        if faster is None:
            return Operations()
        for module in self.model.modules():
            if type(module) is nn.Linear or is_conv(module):
                vars(module)["forward"] = partial(_linear_by, faster.product, module)
        if isinstance(faster, KernelSet) and self._functional_class is not None:
            operations = KernelOperations(faster, self.model.config, self.n_layers)
            operations.replace_norms(self.model)
            return operations
        if isinstance(faster, CompiledOperations) and self._functional_class is FunctionalLlama:
            for module in self.model.modules():
                replace_forward(module, QueuedOperations(faster.product, self.dtype))
            return PreparedOperations(faster.product, self.dtype)
        return Operations(faster.product)

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
        attention: PassAttention | None = None,
    ) -> Tensor:
        """Runs one forward, and returns logits (of all tokens, or of those at `logit_slots`), or the residual stream
        after `num_layers` blocks. Calls no modules if `_functional_forward` has a forward for this pass. Arguments and
        shapes are those of CachedLM.forward."""
        if not self.weights.is_current:
            self.weights.bind()
            self._functional = None
        functional = self._functional_forward(cache, cache_rows)
        with ExitStack() as stack:
            staged = StagedCache(cache, cache_rows, starts, token_ids.shape[1], attention)
            inputs = forward_inputs(staged, self.model.config, self.n_ctx)
            stack.enter_context(keeping_float64(self.dtype))
            token_ids = token_ids.to(self.device)
            if functional is not None:
                positions_and_masks = inputs["position_ids"], inputs["attention_mask"]
                return functional(token_ids, staged, *positions_and_masks, self._listeners, num_layers, logit_slots)
            num_run = self.n_layers if num_layers is None else num_layers
            operations = self._operations
            attend = None
            if isinstance(operations, KernelOperations) and staged.is_written:
                attend = partial(operations.attend, staged)
            stack.enter_context(attending(staged.spans, num_run, attend))
            return self._run_modules(token_ids, inputs, num_layers, logit_slots)

    def _functional_forward(self, cache: KVCache, cache_rows: Sequence[int]) -> FunctionalForward | None:
        """Returns the FunctionalForward, which calls no modules; None if the pass needs the modules."""
        if self._functional_class is None or not self._is_functional:
            return None
        if not self._has_capture_hooks_only or cache.head_masks.concern(cache_rows):
            return None
        if self._functional is None:
            self._functional = self._functional_class(self.model, self._operations)
        return self._functional

    def _run_modules(
        self, token_ids: Tensor, inputs: ForwardInputs, num_layers: int | None, logit_slots: Sequence[int] | None
    ) -> Tensor:
        """Returns the plain model's logits [b, t, v] (only those at `logit_slots`, if given), or the residual stream
        [b, t, m] after `num_layers` blocks, if given."""
        if num_layers is None:
            choice = self.logit_choice(logit_slots)
            logits = self.model(token_ids, use_cache=True, **inputs, **choice).logits
            return logits if logit_slots is None or choice else logits[:, list(logit_slots)]

        def stop(value: Tensor) -> None:
            """Ends the forward by raising _Stopped with this residual stream."""
            raise _Stopped(value)

        # registered last, so that the capture hooks at that block run first
        handle = listen(self._places.of_sites[("pre", 0) if num_layers == 0 else ("S", num_layers - 1)], stop)
        try:
            self.model(token_ids, use_cache=True, **inputs)
        except _Stopped as stopped:
            return stopped.residual
        finally:
            handle.remove()
        raise ModelError(f"{self.name} did not reach block {num_layers}")

    @contextmanager
    def capturing(self, sites: Sequence[tuple[str, int]], sink: StateSink) -> Iterator[None]:
        """Returns a context manager. Inside its `with`, a forward calls `sink(site, layer, activation)` for each (site,
        layer) pair of `sites` whose layer it runs. Raises: ModelError for a site that the model lacks."""
        sites, routers = split(sites)
        missing = [one for one in sites if one not in self._places.of_sites and one[0] not in HEAD_SITES]
        if missing:
            raise ModelError(f"{self.name} has no site {missing[0][0]} at layer {missing[0][1]}")
        with computing, ExitStack() as stack:
            stack.enter_context(capturing_routing(self.name, self.mixtures, routers, sink))
            for site, layer in sites:
                listener: Callable[[Tensor], object] = partial(sink, site, layer)
                if site in HEAD_SITES:
                    place, cut = self._places.of_heads(site, layer)
                    listener = partial(_pass_cut, listener, cut)
                else:
                    place = self._places.of_sites[site, layer]
                    self._listeners.setdefault((site, layer), []).append(listener)
                    stack.callback(self._forget, (site, layer), listener)
                stack.callback(listen(place, listener).remove)
            yield

    @property
    def _has_capture_hooks_only(self) -> bool:
        """True if all PyTorch hooks on the plain model are capture hooks at sites pre, S, T and C."""
        num_hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in self._modules)
        return num_hooks == sum(map(len, self._listeners.values()))

    def _forget(self, site: tuple[str, int], listener: Callable[[Tensor], object]) -> None:
        """Removes a listener from the list of its (site, layer)."""
        self._listeners[site].remove(listener)
        if not self._listeners[site]:
            del self._listeners[site]

    @contextmanager
    def editing(self, sites: Sequence[tuple[str, int]], edit: StateEdit) -> Iterator[None]:
        """Returns a context manager. Inside its `with`, a forward calls `edit(site, layer, activation)` for each (site,
        layer) pair of `sites` whose layer it runs. A returned tensor replaces the activation; None leaves the
        activation unchanged."""

        def edit_heads(site: str, layer: int, value: Tensor) -> Tensor | None:
            """Returns the result of `edit`; at site z, `edit` gets the activation split by head."""
            if site != HEADS:
                return edit(site, layer, value)
            edited = edit(site, layer, value.unflatten(-1, (-1, self.head_shape[1])))
            return None if edited is None else edited.flatten(-2)

        sites, routers = split(sites)
        with computing, ExitStack() as stack:
            stack.enter_context(editing_routers(self.name, self.mixtures, routers, edit))
            for site, layer in sites:
                handle = change(self._places.of_hook(site, layer), partial(edit_heads, site, layer))
                stack.callback(handle.remove)
            yield

    def fingerprint(self) -> dict[str, str | int | float]:
        """Returns the bridge's fingerprint (a dictionary), changed for this forward: path "fast", the attention in use,
        and how products are computed."""
        attention = BY_REQUEST if self.attends_by_request else "sdpa"
        if isinstance(self._operations, KernelOperations):
            attention = f"all slots up to the token's, {self._operations.kernels.text}"
        return {
            **self.origin.fingerprint(),
            "path": "fast",
            "attention": attention,
            "products": self.origin.operations.text if self.origin.operations else TORCH,
        }

    @property
    def attends_by_request(self) -> bool:
        """Whether attention runs request by request, over the slots in a pass's `spans`; otherwise one call covers
        the batch."""
        return self.model.config._attn_implementation == ATTENTION

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


class _Stopped(Exception):
    """Ends a forward early: an exception that carries the residual stream [b, t, m] of the block reached."""

    def __init__(self, residual: Tensor) -> None:
        super().__init__()
        self.residual = residual


def _linear_by(product: Product, module: LiveModule, values: Tensor) -> Tensor:
    return product(values, *affine(module))


def _pass_cut(listener: Callable[[Tensor], object], cut: Cut, value: Tensor) -> None:
    listener(cut(value))
