"""Runs a transformers model on our KVCache, as a CachedLM.

This file contains no code for requests, phases or the storage of captured states.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, lru_cache, partial
from typing import cast

import torch
from torch import Tensor
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from cacheprobe.core.hook_names import RECURRENT
from cacheprobe.core.live import LiveConfig, LiveModule, LiveTokenizer
from cacheprobe.kvcache.recurrent import memory_of
from cacheprobe.kvcache.staged import StagedCache
from cacheprobe.models.base import BlockSum, HeadWriter, ModelError
from cacheprobe.models.experts import own_experts, use_invariant_experts
from cacheprobe.models.fast.graphs import CapturedCache, Graphs
from cacheprobe.models.fast.operations import KernelOperations, LoopOperations, is_silu, replace_forward
from cacheprobe.models.fast.repeated import ModelForward
from cacheprobe.models.fast.tape import Place, RecordedCache
from cacheprobe.models.fast.tapes import Tapes
from cacheprobe.models.hf.attention import ATTENTION, Attend, attending
from cacheprobe.models.hf.cache import ForwardInputs, KVCacheAdapter, forward_inputs, masks_in
from cacheprobe.models.hf.masks import context_length, text_config
from cacheprobe.models.hf.shared import SharedWeights, bridge_around, empty_model, user_hooks
from cacheprobe.models.plain.bridged import WithBridge
from cacheprobe.models.plain.own_states import own_states
from cacheprobe.models.plain.recurrence import RecurrentPlaces, step_by_step
from cacheprobe.models.plain.structure import find_blocks, find_joints
from cacheprobe.models.plain.watch import Watched, cache_argument, find_head, watch
from cacheprobe.models.quantised.packed import packed_modules, weight_tensors
from cacheprobe.models.settings import keeping_float64, one_at_a_time
from cacheprobe.models.weights import ROTATIONS_OF_PASSES, head_weights
from cacheprobe.ops.attention import BY_REQUEST
from cacheprobe.ops.compiled.attention import MOST_TOKENS
from cacheprobe.ops.compiled.lanes import FORMATS
from cacheprobe.ops.compiled.operations import TORCH, CompiledOperations
from cacheprobe.ops.kernel_set import KernelSet

_PLAIN_FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Families whose blocks have only linear layers, RMSNorms, rotations, attention, gates and sums."""


class PlainLM(WithBridge):
    """Runs a transformers model on our KVCache, as a CachedLM: a copy of it, which shares its weights. Finds the
    modules of its states by their values. The modules compute in compiled loops or kernels where `use_operations` was
    given some.

    Twin: the model's own uncached forward, close(1e-5) in float32; `check_model` compares both at load, to 1e-3. Also
    BridgeLM: logits, S, T, C, keys and values close(1e-4) in float32, since sums have another order.
    """

    path = "plain"
    tapes: Tapes | Graphs | None = None
    """Computes passes whose shape occurs again without modules, on a GPU by Graphs; None if modules compute all."""

    def __init__(self, live: LiveModule, tokenizer: LiveTokenizer, name: str, note: str = "") -> None:
        """live: the transformers model, which may be inside a TransformerBridge.

        Raises: ModelError if the model's parts are not found; see `find_blocks` and `find_head`.
        """
        live.eval()
        bridge = bridge_around(live)
        if bridge is not None and (bridge.compatibility_mode or bridge._weights_processed):
            raise ModelError(f"{name}: the bridge's weights were processed (compatibility mode)")
        own = own_states(live.config)
        changed = own.prepare(live) if own is not None else ""
        super().__init__(live, tokenizer, name, "; ".join(filter(None, (note, changed))))
        self.model: LiveModule = empty_model(live)
        self.weights = SharedWeights(live, self.model)
        self.listeners, self.attention_listeners = {}, {}
        _take_whole_masks(self.model)
        config = self.config
        try:
            watched = self._watched()
            self.blocks = find_blocks(watched, config, self.dtype)
            last = next(call for call in watched.calls if call.path == self.blocks[-1].path)
            assert last.value_out is not None
            self.head = find_head(self.model, watched, last.value_out, config, self.dtype)
        except ModelError as refusal:
            kind = type(live).__name__
            raise ModelError(f"{kind if name == kind else f'{name}: {kind}'}: {refusal}") from refusal
        began = next(call.began for call in watched.calls if call.path == self.blocks[0].path)
        self.modules_before = frozenset(call.path for call in watched.calls if call.ended < began)
        self.initial = watched.initial
        recurrent = {layer: states.get((RECURRENT, 0)) for layer, states in self.initial.items()}
        self.state_shapes = {layer: (len(s), s[0].numel()) for layer, s in recurrent.items() if s is not None}
        step_by_step(self.model, watched.keys_of, None if own is None else own.feed)
        self.n_layers, self.d_model = len(self.blocks), int(last.value_out.shape[-1])
        self.d_vocab = int(watched.logits.shape[-1])
        self.sources = watched.sources
        is_fixed = config.model_type in ("bloom", "gpt_bigcode", "xglm", "zamba", "zamba2") or getattr(
            config, "alibi", 0
        )
        self.batch_may_grow = not (is_fixed or self.sources)
        """False if the model reads what was made before its blocks for each batch index: biases (Bloom), masks (XGLM),
        embeddings (Zamba), a shape (GPTBigCode), another layer's keys. Then no batch index may join between blocks."""
        self.block_sums = [BlockSum(block.input_factor, len(block.mlp)) for block in self.blocks]
        shapes, devices = watched.probe.layer_shapes, watched.probe.devices
        places = [self.sources.get(layer, layer) for layer in range(self.n_layers)]
        self.layer_shapes = [shapes.get(place, (0, 0, 0)) for place in places]
        self.layer_devices = [devices.get(place, next(iter(devices.values()))) for place in places]
        self.joints = find_joints(watched, self.blocks, self.layer_shapes)
        self.n_ctx = context_length(config)
        first = next((layer for layer in range(self.n_layers) if self.layer_shapes[layer][0]), 0)
        try:
            heads = self.heads_of(first)
        except ModelError:  # attention without one output projection: only its heads cannot be told apart
            heads = int(getattr(config, "num_attention_heads", 0)) or self.layer_shapes[first][0]
        self.head_shape = (heads, self.layer_shapes[first][2])
        if bridge is not None:
            self._bridge_at_first = self._state_of_bridge(bridge)
        self._modules = list(self.model.modules())
        self.use_operations(None)

    def use_operations(self, faster: CompiledOperations | KernelSet | None) -> None:
        """Makes the modules and the readings compute with compiled loops or kernels; None for torch alone."""
        self.operations = faster
        self.mixtures = use_invariant_experts(self.model, None if faster is None else faster.product)
        self._has_sinks = any(name.endswith("sinks") for name, _ in self.model.named_parameters())
        self._by_module: LoopOperations | KernelOperations | None = None
        if isinstance(faster, CompiledOperations):
            self._by_module = LoopOperations(faster.product, self.dtype)
        elif faster is not None:
            self._by_module = KernelOperations(faster, self.model.config, self.n_layers)
        for module in self._modules:
            replace_forward(module, self._by_module)
        self.tapes, self._addresses = None, list[int]()
        is_fixed = bool(self.mixtures or self.initial or self.sources or packed_modules(self.live))
        if is_fixed or not self.attends_by_request:
            return
        if isinstance(faster, KernelSet):
            self.tapes = Graphs(self.device) if self.device.type == "cuda" else None
        else:
            blocks = [self.model.get_submodule(block.path) for block in self.blocks]
            self.tapes = Tapes(blocks, cast("LoopOperations | None", self._by_module), self.dtype)

    @property
    def config(self) -> LiveConfig:
        """Config of the transformers model; of a multimodal one, that of its text decoder."""
        return text_config(self.model.config)

    @property
    def independent_width(self) -> int:
        """Largest width, in tokens, up to which no result for a token depends, by construction, on the width of a pass
        or on its other requests: compiled loops or kernels compute products, norms, attention and activations. 0 if
        there is none. In wider passes torch computes the attention, by request, in calls whose shape has the width."""
        if type(self.model).__name__ not in _PLAIN_FAMILIES or not self.attends_by_request or self.has_own_hooks:
            return 0
        if getattr(self.model.model.rotary_emb, "rope_type", "default") in ROTATIONS_OF_PASSES:
            return 0
        if isinstance(self._by_module, KernelOperations):
            by_torch = {"matmul", "rms_norm", "cached_attention"} & {*self._by_module.kernels.by_torch}
            is_whole = self.device.type == "cuda" and not by_torch
            return self.n_ctx if is_whole else 0  # on a CPU torch's loops compute the activation
        is_in_loops = self._by_module is not None
        is_in_loops &= all(is_silu(layer.mlp.act_fn) for layer in self.model.model.layers)
        return MOST_TOKENS[FORMATS[self.dtype]] if is_in_loops else 0

    def _forward(
        self, token_ids: Tensor, cache: StagedCache, num_layers: int | None, logit_slots: Sequence[int] | None
    ) -> Tensor:
        """Returns what `forward` returns. A tape or a graph computes passes whose shape occurs again."""
        if not self.weights.is_current:
            self.weights.follow(self.name)
        if self.sources and cache.cache.head_masks.concern(cache.rows):
            raise ModelError(
                f"{self.name}: layers {', '.join(map(str, self.sources))} attend over the keys of others, so slots "
                "are hidden in all layers and heads or in none; leave out layers= and heads="
            )
        choice = self.logit_choice(None if self.num_hooked_outside else logit_slots)
        cache.is_read_in_place = self._is_read_in_place(cache)
        inputs = lru_cache(None)(partial(forward_inputs, config=self.config, n_ctx=self.n_ctx))

        def outside(staged: StagedCache) -> Tensor:
            """Returns the logits of the transformers model, or its residual stream after `num_layers` blocks."""
            arguments = self._given(staged, inputs(staged if isinstance(staged, CapturedCache) else cache))
            token_ids = staged.placed(self.device).token_ids
            if num_layers is not None:
                return self._residual(token_ids, arguments, num_layers)
            return self.model(token_ids, use_cache=True, **arguments, **choice).logits

        def whole(staged: StagedCache) -> Tensor:
            """Returns the same, with the attention of this pass."""
            tape = staged.tape if isinstance(staged, RecordedCache) else None
            num_attending = self._num_attending(num_layers)
            with attending(staged.spans, num_attending, self._attend(staged), self.attention_listeners, tape):
                return outside(staged)

        with keeping_float64(self.dtype):
            if self._may_tape(cache, num_layers, logit_slots):
                assert self.tapes is not None
                forward = ModelForward(num_layers, whole, outside, lambda: masks_in(inputs(cache)), self._noting)
                out = self.tapes.run(cache, forward, self.listeners)
            else:
                out = whole(cache)
        out = out.to(self.device)  # the last layers may lie on another one
        return out if logit_slots is None or choice or num_layers is not None else out[:, list(logit_slots)]

    def _is_read_in_place(self, cache: StagedCache) -> bool:
        """Returns True if only a kernel reads the keys of a pass: no mask, and no function that shows attention."""
        if self._attend(cache) is None or self.attention_listeners or cache.cache.head_masks.concern(cache.rows):
            return False
        return type(self.model).__name__ in _PLAIN_FAMILIES and self.attends_by_request and not self.has_own_hooks

    def _may_tape(self, cache: StagedCache, num_layers: int | None, logit_slots: Sequence[int] | None) -> bool:
        """Returns True if a tape or graph may compute this pass: nobody listens inside the blocks, or hides slots
        there."""
        if self.tapes is None or num_layers == 0 or self.attention_listeners or not self._has_capture_hooks_only:
            return False
        if isinstance(self.tapes, Graphs) and self._attend(cache) is None:  # torch attends by what the host knows
            return False
        addresses = [tensor.data_ptr() for *_, tensor in self.weights.taken]
        if self._addresses != addresses:  # a weight or buffer was replaced or moved
            self.tapes.forget()
            self._addresses = addresses
        return self.tapes.takes(cache, logit_slots) and not cache.cache.head_masks.concern(cache.rows)

    def _given(self, cache: StagedCache, inputs: ForwardInputs) -> dict[str, object]:
        """Returns the arguments of the transformers model's forward."""
        memory = memory_of(cache.cache)
        places = None if memory is None else RecurrentPlaces(memory, cache.rows, cache.starts)
        length = None if isinstance(cache, CapturedCache) else cache.starts[0]
        named = {**inputs, **cache_argument(self.model, KVCacheAdapter(cache, length, places))}
        return {name: value for name, value in named.items() if name in self._arguments}

    @contextmanager
    def _noting(self, places: Iterable[Place], note: Callable[[Place, Tensor], None]) -> Iterator[None]:
        """Calls `note` with the activations of these places inside the `with`."""

        def keep(place: Place, value: Tensor) -> None:
            """Notes the activation, and leaves it unchanged."""
            note(place, value)

        with ExitStack() as stack:
            for place in places:
                self._add_hooks(stack, *place, partial(keep, place))
            yield

    def cache_layers(self) -> tuple[Sequence[tuple[int, int, int]], Sequence[torch.device]]:
        """Returns the shape of each layer's cache, and its device."""
        return self.layer_shapes, self.layer_devices

    @property
    def _has_capture_hooks_only(self) -> bool:
        """True if all PyTorch hooks on the copied model are capture hooks at sites pre, S, T and C."""
        if _global_forward_hooks or _global_forward_pre_hooks:
            return False
        num_hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in self._modules)
        return num_hooks == sum(map(len, self.listeners.values()))

    def _attend(self, cache: StagedCache) -> Attend | None:
        """Returns the function that computes the attention of a pass; None for cacheprobe's attention in torch."""
        operations = self._by_module
        if not (isinstance(operations, KernelOperations) and self._kernel_attends and cache.is_written):
            return None
        return partial(operations.attend, cache)

    @property
    def _kernel_attends(self) -> bool:
        """False without a kernel of attention, and if scores are limited or have sinks, which the kernel lacks."""
        if not (isinstance(self._by_module, KernelOperations) and self._by_module.kernels.attend):
            return False
        return not (getattr(self.config, "attn_logit_softcapping", None) or self._has_sinks)

    def _num_attending(self, num_layers: int | None) -> int:
        """Returns how many of the first `num_layers` layers, None for all, have attention."""
        count = self.n_layers if num_layers is None else num_layers
        return sum(heads > 0 for heads, *_ in self.layer_shapes[:count])

    def _residual(self, token_ids: Tensor, arguments: dict[str, object], num_layers: int) -> Tensor:
        """Returns the residual stream [b, t, m] after `num_layers` blocks, and computes no further block."""

        def stop(value: Tensor) -> None:
            """Ends the forward by raising _Reached with this residual stream."""
            raise _Reached(value)

        with ExitStack() as stack:  # registered last, so that the capture hooks at that block run first
            self._add_hooks(stack, *(("S", num_layers - 1) if num_layers else ("pre", 0)), stop)
            try:
                self.model(token_ids, use_cache=True, **arguments)
            except _Reached as reached:
                return reached.residual
        raise ModelError(f"{self.name} did not reach block {num_layers}")

    @cached_property
    def _arguments(self) -> set[str]:
        """Names of the arguments of the model's forward."""
        names = inspect.signature(type(self.model).forward).parameters
        takes_more = any(one.kind == one.VAR_KEYWORD for one in names.values())
        inner = inspect.signature(type(self.model.base_model).forward).parameters if takes_more else {}
        return {*names, *inner}

    def _watched(self) -> Watched:
        """Returns what one short forward of the model's own attention showed. Raises: ModelError if it fails."""
        try:
            with _own_attention(self.model):
                return watch(self.model, self.device, self.dtype, int(self.config.vocab_size))
        except ModelError:
            raise
        except (ValueError, RuntimeError, TypeError, IndexError, AttributeError, KeyError) as error:
            raise ModelError(
                f"it does not run on a cache of keys and values ({type(error).__name__}: {error!s:.120})"
            ) from error

    def whole_forward(self, token_ids: Tensor) -> Tensor:
        """Returns the logits [b, t, v] of one forward without our cache, masks or positions, with the model's own
        attention and experts. Gradients flow back into what `editing` put into it."""
        self.token_shape = (token_ids.shape[0], token_ids.shape[1])
        with _own_attention(self.model), own_experts(self.mixtures), keeping_float64(self.dtype):
            return self.model(token_ids, use_cache=False).logits

    @one_at_a_time()
    @torch.inference_mode()
    def original_logits(self, token_ids: Tensor) -> Tensor:
        """Returns the logits [b, t, v] of one forward of the transformers model itself, or of the bridge around it,
        which `whole_logits` must equal. Those of `whole_logits` if the model has a hook, which may change them, or
        packed weights, which the model's own forward may change."""
        if next(user_hooks(self.live), None) is not None or packed_modules(self.live):
            return self.whole_logits(token_ids)
        with keeping_float64(self.dtype):
            if (bridge := bridge_around(self.live)) is not None:
                return bridge.forward(token_ids.to(self.device), return_type="logits")
            return self.live(token_ids.to(self.device), use_cache=False).logits

    def head_writer(self, layer: int) -> HeadWriter:
        """Returns the steps from one layer's attention heads to the residual stream as a HeadWriter.

        Raises: ModelError if the layer has no output projection, or if T is neither that projection's output nor a norm
        of it.
        """
        projection, block = self.projection(layer), self.blocks[layer]
        if block.mixer:
            raise ModelError(
                f"{self.name}: T of layer {layer} is not the attention's output alone, so heads are not split"
            )
        (attended,), path = block.attended, block.attention
        if attended.factor != 1:
            raise ModelError(
                f"{self.name}: block {layer} scales what attention adds, by {attended.factor:.4g}, so heads are not "
                'split; run it without "z"'
            )
        is_inside = attended.path == path or attended.path.startswith(path + ".")
        norm = None if is_inside else self.model.get_submodule(attended.path)
        return HeadWriter(head_weights(projection, self.heads_of(layer)), projection.bias, norm)

    def named_weights(self) -> list[tuple[str, Tensor]]:
        """Returns all parameters with their names, sorted by name; of packed weights, their parts."""
        self.weights.follow(self.name)
        return sorted(weight_tensors(self.model), key=lambda item: item[0])

    def fingerprint_of_path(self) -> dict[str, str | int | float]:
        """Returns what a fingerprint says of this path: its name, its attention, and what else it depends on."""
        attention = BY_REQUEST if self.attends_by_request else str(self.config._attn_implementation)
        if isinstance(self._by_module, KernelOperations) and self._kernel_attends:
            attention = f"all slots up to the token's, {self._by_module.kernels.text}"
        products = self.operations.text if self.operations else TORCH
        recurrence = {"recurrence": "token by token"} if self.initial else {}
        return {"path": self.path, "attention": attention, "products": products, **recurrence}


class _Reached(Exception):
    """Ends a forward early: an exception that carries the residual stream [b, t, m] of the block reached."""

    def __init__(self, residual: Tensor) -> None:
        super().__init__()
        self.residual = residual


@contextmanager
def _own_attention(model: LiveModule) -> Iterator[None]:
    """Makes a model compute with transformers' own eager attention and masks inside the `with`."""
    config = model.config
    before = config._attn_implementation
    if before == ATTENTION:
        config._attn_implementation = "eager"
    try:
        yield
    finally:
        config._attn_implementation = before


def _take_whole_masks(model: LiveModule) -> None:
    """Makes Bloom's ALiBi take its number of slots from a mask [b, 1, t, s]. Adding a number to all scores of a query
    changes nothing, so that scores may be biased by slot instead of by distance."""
    decoder = model.base_model
    if (own := getattr(decoder, "build_alibi_tensor", None)) is None:
        return

    def by_slot(mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
        """Returns the bias [b * h, 1, s] of all slots."""
        slots = torch.ones(mask.shape[0], mask.shape[-1], dtype=torch.long, device=mask.device)
        return own(slots, num_heads, dtype=dtype)

    vars(decoder)["build_alibi_tensor"] = by_slot
