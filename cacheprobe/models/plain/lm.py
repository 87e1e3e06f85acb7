"""Runs a transformers model without a TransformerBridge, as a CachedLM.

This file contains no code for requests, phases or the storage of captured states.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property

import torch
from torch import Tensor

from cacheprobe.core.hook_names import RECURRENT
from cacheprobe.core.live import LiveConfig, LiveModule, LiveTokenizer
from cacheprobe.kvcache.recurrent import memory_of
from cacheprobe.kvcache.staged import StagedCache
from cacheprobe.models.base import BlockSum, HeadWriter, ModelError
from cacheprobe.models.experts import own_experts, use_invariant_experts
from cacheprobe.models.fast.functional import FunctionalForward
from cacheprobe.models.hf.attention import ATTENTION, Attend, attending
from cacheprobe.models.hf.cache import KVCacheAdapter, forward_inputs
from cacheprobe.models.hf.lm import HuggingFaceLM
from cacheprobe.models.hf.masks import context_length, text_config
from cacheprobe.models.hf.shared import SharedWeights, empty_model, plain_path
from cacheprobe.models.plain.own_states import own_states
from cacheprobe.models.plain.recurrence import RecurrentPlaces, step_by_step
from cacheprobe.models.plain.sites import PlainSites
from cacheprobe.models.plain.structure import find_blocks
from cacheprobe.models.plain.watch import Watched, cache_argument, find_head, watch
from cacheprobe.models.quantised.packed import weight_tensors
from cacheprobe.models.settings import keeping_float64, one_at_a_time
from cacheprobe.models.weights import head_weights
from cacheprobe.ops.attention import BY_REQUEST


class CopiedLM(PlainSites, HuggingFaceLM):
    """Runs a copy of a transformers model on our KVCache; the copy shares the model's weights. Base class of PlainLM
    and FastLM."""

    layer_devices: Sequence[torch.device]
    """Device of each layer's keys and values."""
    shows_length = False
    """Whether the model may ask the cache for a length: it is told that of the first batch index."""

    def __init__(self, live: LiveModule, tokenizer: LiveTokenizer, name: str, note: str) -> None:
        super().__init__(live, tokenizer, name, note)
        self.hooked_module = live
        self.model: LiveModule = empty_model(live)
        self.weights = SharedWeights(live, self.model)
        self.listeners = {}

    @property
    def config(self) -> LiveConfig:
        """Config of the transformers model; of a multimodal one, that of its text decoder."""
        return text_config(self.model.config)

    @property
    def attends_by_request(self) -> bool:
        """Whether attention runs request by request, over the slots in a pass's `spans`; otherwise one call covers
        the batch."""
        return self.model.config._attn_implementation == ATTENTION

    def _forward(
        self, token_ids: Tensor, cache: StagedCache, num_layers: int | None, logit_slots: Sequence[int] | None
    ) -> Tensor:
        """Returns what `forward` returns. Calls no modules if `_functional_forward` has a forward for this pass."""
        if not self.weights.is_current:
            self._rebind()
        functional = self._functional_forward(cache)
        self.token_shape = (token_ids.shape[0], token_ids.shape[1])
        inputs = forward_inputs(cache, self.config, self.n_ctx)
        with keeping_float64(self.dtype):
            if functional is not None:
                positions_and_masks = inputs["position_ids"], inputs["attention_mask"]
                return functional(token_ids, cache, *positions_and_masks, self.listeners, num_layers, logit_slots)
            memory = memory_of(cache.cache)
            places = None if memory is None else RecurrentPlaces(memory, cache.rows, cache.starts)
            adapter = KVCacheAdapter(cache, cache.starts[0] if self.shows_length else None, places)
            named = {**inputs, **cache_argument(self.model, adapter)}
            arguments = {name: value for name, value in named.items() if name in self._arguments}
            with attending(cache.spans, self._num_attending(num_layers), self._attend(cache)):
                if num_layers is not None:
                    return self._residual(token_ids, arguments, num_layers)
                choice = self.logit_choice(logit_slots)
                logits = self.model(token_ids, use_cache=True, **arguments, **choice).logits
                return logits if logit_slots is None or choice else logits[:, list(logit_slots)]

    def cache_layers(self) -> tuple[Sequence[tuple[int, int, int]], Sequence[torch.device]]:
        """Returns the shape of each layer's cache, and its device."""
        return self.layer_shapes, self.layer_devices

    def _rebind(self) -> None:
        """Takes the present tensors of the transformers model."""
        self.weights.bind()

    def _functional_forward(self, cache: StagedCache) -> FunctionalForward | None:
        """Returns a forward that calls no modules; None if the pass needs the modules."""
        return None

    def _attend(self, cache: StagedCache) -> Attend | None:
        """Returns the function that computes the attention of a pass; None for cacheprobe's attention in torch."""
        return None

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


class PlainLM(CopiedLM):
    """Runs a transformers model without a bridge, as a CachedLM. Finds the modules of its states by their values.

    Twin: the model's own uncached forward, close(1e-5) in float32; `check_model` compares both at load, to 1e-3.
    """

    shows_length = True

    def __init__(self, live: LiveModule, tokenizer: LiveTokenizer, name: str, note: str = "", why: str = "") -> None:
        """live: the transformers model.  why: why no bridge runs it, for the reason of the path.

        Raises: ModelError if the model's parts are not found; see `find_blocks` and `find_head`.
        """
        live.eval()
        own = own_states(live.config)
        changed = own.prepare(live) if own is not None else ""
        super().__init__(live, tokenizer, name, "; ".join(filter(None, (note, changed))))
        self.why = why
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
        self.initial = watched.initial
        recurrent = {layer: states.get((RECURRENT, 0)) for layer, states in self.initial.items()}
        self.state_shapes = {layer: (len(s), s[0].numel()) for layer, s in recurrent.items() if s is not None}
        step_by_step(self.model, watched.keys_of, None if own is None else own.feed)
        self.mixtures = use_invariant_experts(self.model, None)
        self.n_layers, self.d_model = len(self.blocks), int(last.value_out.shape[-1])
        self.d_vocab = int(watched.logits.shape[-1])
        self.sources = watched.sources
        is_fixed = config.model_type in ("bloom", "xglm", "zamba", "zamba2") or bool(getattr(config, "alibi", False))
        self.batch_may_grow = not (is_fixed or self.sources)
        """False if blocks read what was made before them for each batch index: biases (Bloom), masks (XGLM), embeddings
        (Zamba), another layer's keys. Then no batch index may join between two blocks."""
        self.block_sums = [BlockSum(block.input_factor, len(block.mlp)) for block in self.blocks]
        shapes, devices = watched.probe.layer_shapes, watched.probe.devices
        places = [self.sources.get(layer, layer) for layer in range(self.n_layers)]
        self.layer_shapes = [shapes.get(place, (0, 0, 0)) for place in places]
        self.layer_devices = [devices.get(place, next(iter(devices.values()))) for place in places]
        self.n_ctx = context_length(config)
        first = next((layer for layer in range(self.n_layers) if self.layer_shapes[layer][0]), 0)
        try:
            heads = self.heads_of(first)
        except ModelError:  # attention without one output projection: only its heads cannot be told apart
            heads = int(getattr(config, "num_attention_heads", 0)) or self.layer_shapes[first][0]
        self.head_shape = (heads, self.layer_shapes[first][2])

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

    def _functional_forward(self, cache: StagedCache) -> None:
        """Checks that the pass hides no slots that other layers need. Returns None: the modules compute all passes."""
        if self.sources and cache.cache.head_masks.concern(cache.rows):
            raise ModelError(
                f"{self.name}: layers {', '.join(map(str, self.sources))} attend over the keys of others, so slots are "
                "hidden in all layers and heads or in none; leave out layers= and heads="
            )

    @one_at_a_time()
    @torch.inference_mode()
    def whole_logits(self, token_ids: Tensor) -> Tensor:
        """Returns the logits [b, t, v] of one forward without our cache, masks or positions, with the model's own
        attention and experts."""
        with _own_attention(self.model), own_experts(self.mixtures), keeping_float64(self.dtype):
            return self.model(token_ids.to(self.device), use_cache=False).logits

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
        named = [(plain_path(name), weight) for name, weight in weight_tensors(self.live)]  # a bridge may be around
        return sorted(named, key=lambda item: item[0])

    def fingerprint_of_path(self) -> dict[str, str | int | float]:
        """Returns what a fingerprint says of this path: its name, its attention, and what else it depends on."""
        attention = BY_REQUEST if self.attends_by_request else str(self.config._attn_implementation)
        recurrence = {"recurrence": "token by token"} if self.initial else {}
        return {"path": "plain", "attention": attention, **recurrence}


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
