"""Runs a plain transformers model as a CachedLM, without a TransformerBridge.

This file contains no code for requests, phases or the storage of captured states.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property

import torch
from torch import Tensor

from cacheprobe.core.hook_names import OUTPUT_POINT, RECURRENT, hook_name, resid_pre_name
from cacheprobe.core.live import LiveConfig, LiveModule, LiveTokenizer
from cacheprobe.kvcache.cache import KVCache
from cacheprobe.kvcache.recurrent import RecurrentCache
from cacheprobe.kvcache.staged import PassAttention, StagedCache
from cacheprobe.models.base import BlockSum, ModelError
from cacheprobe.models.experts.sites import EXPERTS, own_experts, use_invariant_experts
from cacheprobe.models.facts import HashedWeights, buffers_sha256, one_dtype, stop_ids
from cacheprobe.models.fast.module_hooks import listen
from cacheprobe.models.hf.attention import ATTENTION, attending
from cacheprobe.models.hf.float64 import keeping_float64
from cacheprobe.models.hf.masks import context_length, text_config
from cacheprobe.models.hf.shared import SharedWeights, empty_model, plain_path
from cacheprobe.models.hf.text import TokenText
from cacheprobe.models.output_parts import HeadWriter, OutputParts, head_weights, output_rows
from cacheprobe.models.plain.cache import plain_inputs
from cacheprobe.models.plain.output import find_head
from cacheprobe.models.plain.own_states import own_states
from cacheprobe.models.plain.recurrence import step_by_step
from cacheprobe.models.plain.sites import PlainSites
from cacheprobe.models.plain.structure import find_blocks
from cacheprobe.models.plain.watch import cache_argument, watch
from cacheprobe.models.quantised.packed import quantised_text, weight_tensors
from cacheprobe.models.settings import numeric_settings
from cacheprobe.models.turns import one_at_a_time
from cacheprobe.ops.attention.by_request import BY_REQUEST
from cacheprobe.ops.compiled.choice import TORCH
from cacheprobe.ops.readout import Readout


class PlainLM(PlainSites, TokenText, HashedWeights):
    """Runs a plain transformers model on our KVCache, as a CachedLM: a copy of the model that shares its weights.

    Twin: the model's own uncached forward, close(1e-5) in float32; `check_plain` compares both at load, to 1e-3.
    """

    operations = None
    injected_layers: tuple[int, ...] = ()

    def __init__(self, live: LiveModule, tokenizer: LiveTokenizer, name: str, note: str = "", why: str = "") -> None:
        """live: the transformers model.  why: why no bridge runs it, for the reason of the path.

        Raises: ModelError if the model's parts are not found; see `find_blocks` and `find_head`.
        """
        self.live, self.name, self.weights_note, self.why = live, name, note, why
        self.tokenizer, self.adapter = tokenizer, ""
        live.eval()
        own = own_states(live.config)
        if own is not None and (change := own.prepare(live)):
            self.weights_note = "; ".join(filter(None, (note, change)))
        self.dtype, self.device = one_dtype(live, name), next(live.parameters()).device
        self.model: LiveModule = empty_model(live)
        self.attends_by_request = self.config._attn_implementation == ATTENTION
        self.weights = SharedWeights(live, self.model)
        _take_whole_masks(self.model)
        self.stop_token_ids, self.stop_source = stop_ids(live, tokenizer)
        config = self.config
        try:
            with _own_attention(self.model):
                watched = watch(self.model, self.device, self.dtype, int(config.vocab_size))
        except ModelError as refusal:
            raise ModelError(f"{_titled(live, name)}: {refusal}") from refusal
        except (ValueError, RuntimeError, TypeError, IndexError, AttributeError, KeyError) as error:
            raise ModelError(
                f"{_titled(live, name)} does not run on a cache of keys and values ({type(error).__name__}: "
                f"{error!s:.120})"
            ) from error
        try:
            self.blocks = find_blocks(watched, config, self.dtype)
            last = next(call for call in watched.calls if call.path == self.blocks[-1].path)
            assert last.value_out is not None
            self.head = find_head(self.model, watched, last.value_out, config, self.dtype)
        except ModelError as refusal:
            raise ModelError(f"{_titled(live, name)}: {refusal}") from refusal
        self.initial = watched.initial
        """Recurrent layer -> its states before the first token."""
        recurrent = {layer: states.get((RECURRENT, 0)) for layer, states in self.initial.items()}
        self.state_shapes = {layer: (len(s), s[0].numel()) for layer, s in recurrent.items() if s is not None}
        step_by_step(self.model, watched.keys_of, None if own is None else own.feed)
        self.mixtures = use_invariant_experts(self.model, None)
        self.n_layers, self.d_model = len(self.blocks), int(last.value_out.shape[-1])
        self.d_vocab = int(watched.logits.shape[-1])
        self.sources = watched.sources
        """Layer without keys and values of its own -> the layer whose keys and values it reads."""
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

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"PlainLM({self.name}, {self.n_layers} layers, d_model {self.d_model}, {dtype}, {self.device})"

    @property
    def config(self) -> LiveConfig:
        """Config of the transformers model; of a multimodal one, that of its text decoder."""
        return text_config(self.model.config)

    def check_settings(self, window: int) -> None:
        """Does nothing: a PlainLM supports verify passes with any number of tokens."""

    def new_cache(self, num_rows: int, capacity: int) -> KVCache:
        """Returns an empty KVCache with this model's layer shapes: `num_rows` cache rows, one for each sequence, of
        `capacity` token slots each, without heads in layers that attend over another layer's keys; a RecurrentCache if
        the model has recurrent layers."""
        shapes = [(0, 0, 0) if i in self.sources else shape for i, shape in enumerate(self.layer_shapes)]
        if self.initial:
            return RecurrentCache(num_rows, capacity, shapes, self.dtype, self.layer_devices, self.initial)
        return KVCache(num_rows, capacity, shapes, self.dtype, self.layer_devices)

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
        after `num_layers` blocks. Arguments and shapes are those of CachedLM.forward."""
        if not self.weights.is_current:
            self.weights.bind()
        if self.sources and cache.head_masks.concern(list(cache_rows)):
            raise ModelError(
                f"{self.name}: layers {', '.join(map(str, self.sources))} attend over the keys of others, so slots are "
                "hidden in all layers and heads or in none; leave out layers= and heads="
            )
        self.token_shape = (token_ids.shape[0], token_ids.shape[1])
        with ExitStack() as stack:
            staged = StagedCache(cache, cache_rows, starts, token_ids.shape[1], attention)
            inputs = plain_inputs(staged, self.config, self.n_ctx)
            stack.enter_context(keeping_float64(self.dtype))
            stack.enter_context(attending(staged.spans, self._num_attending(num_layers)))
            named = {**inputs, **cache_argument(self.model, inputs["past_key_values"])}
            arguments = {name: value for name, value in named.items() if name in self._arguments}
            token_ids = token_ids.to(self.device)
            if num_layers is None:
                choice = self._logit_choice(logit_slots)
                logits = self.model(token_ids, use_cache=True, **arguments, **choice).logits
                return logits if logit_slots is None or choice else logits[:, list(logit_slots)]
            return self._residual(token_ids, arguments, num_layers)

    def _num_attending(self, num_layers: int | None) -> int:
        """Returns how many of the first `num_layers` layers, None for all, have attention."""
        count = self.n_layers if num_layers is None else num_layers
        return sum(heads > 0 for heads, *_ in self.layer_shapes[:count])

    def _residual(self, token_ids: Tensor, arguments: dict[str, object], num_layers: int) -> Tensor:
        """Returns the residual stream [b, t, m] after `num_layers` blocks, and computes no further block."""

        def stop(value: Tensor) -> None:
            """Ends the forward by raising _Reached with this residual stream."""
            raise _Reached(value)

        with ExitStack() as stack:
            if num_layers == 0:
                self._add_hooks(stack, "pre", 0, stop)
            else:  # registered last, so that the capture hooks at that block run first
                block = self.model.get_submodule(self.blocks[num_layers - 1].path)
                stack.callback(listen((block, OUTPUT_POINT), stop).remove)
            try:
                self.model(token_ids, use_cache=True, **arguments)
            except _Reached as reached:
                return reached.residual
        raise ModelError(f"{self.name} did not reach block {num_layers}")

    @one_at_a_time()
    @torch.inference_mode()
    def whole_logits(self, token_ids: Tensor) -> Tensor:
        """Returns the logits [b, t, v] of one forward without our cache, masks or positions, with the model's own
        attention and experts."""
        with _own_attention(self.model), own_experts(self.mixtures), keeping_float64(self.dtype):
            return self.model(token_ids.to(self.device), use_cache=False).logits

    @cached_property
    def _arguments(self) -> set[str]:
        """Names of the arguments of the model's forward."""
        names = inspect.signature(type(self.model).forward).parameters
        takes_more = any(one.kind == one.VAR_KEYWORD for one in names.values())
        inner = inspect.signature(type(self.model.base_model).forward).parameters if takes_more else {}
        return {*names, *inner}

    def _logit_choice(self, logit_slots: Sequence[int] | None) -> dict[str, Tensor]:
        if logit_slots is None or "logits_to_keep" not in self._arguments:
            return {}
        return {"logits_to_keep": torch.tensor(list(logit_slots), device=self.device)}

    @property
    def unembedding(self) -> Tensor:
        """Unembedding matrix [v, m], which maps the normalised residual stream to logits. The tensor is the model's
        own, not a copy."""
        return self.output_parts().weight

    def output_parts(self) -> OutputParts:
        """Returns the steps from the last residual stream to the logits as OutputParts."""
        unembed: LiveModule = self.head.unembed
        return OutputParts(self.head.norm, output_rows(unembed), unembed.bias, self.head.finish)

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

    @one_at_a_time()
    @torch.inference_mode()
    def read_out(self, states: Tensor) -> Tensor:
        """Returns logits [n, v] of residual states [n, m]: final norm, unembedding, then the architecture's softcap or
        scale. Records no gradients."""
        return self.read_out_with_gradients(states)

    def read_tokens(self, states: Tensor, target_token_ids: Tensor, top_k: int) -> Readout | None:
        """Returns None: torch computes all logits."""
        return None

    def read_out_with_gradients(self, states: Tensor) -> Tensor:
        """Returns the logits of `read_out`, and lets gradients flow back into `states`."""
        with keeping_float64(self.dtype):
            return self.head.finish(self.head.unembed(self.head.norm(states[None])))[0]

    def _named_weights(self) -> list[tuple[str, Tensor]]:
        named = [(plain_path(name), weight) for name, weight in weight_tensors(self.live)]  # a bridge may be around
        return sorted(named, key=lambda item: item[0])

    def fingerprint(self) -> dict[str, str | int | float]:
        """Returns a dictionary of properties of the model, the libraries and the process that may change the bits of a
        result: weights hash, dtype, device, threads and others."""
        return {
            "model": self.name,
            **({"adapter": self.adapter} if self.adapter else {}),
            **({"prepend_bos": True} if self.prepend_bos else {}),
            "weights_sha256": self.weights_sha256,
            "buffers_sha256": buffers_sha256(self.live),
            **({"quantised": text} if (text := quantised_text(self.live)) else {}),
            "architecture": type(self.live).__name__,
            "path": "plain",
            "attention": BY_REQUEST if self.attends_by_request else str(self.config._attn_implementation),
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": ", ".join(dict.fromkeys(map(str, self.layer_devices))),
            "readings": TORCH,
            **({"experts": EXPERTS} if self.mixtures else {}),
            **({"recurrence": "token by token"} if self.initial else {}),
            **numeric_settings(),
        }

    def to_activation_cache(self, states: dict[tuple[str, int], Tensor]) -> object:
        """Returns the given states as TransformerLens' ActivationCache. states: (site, layer) -> tensor [p, m] of p
        positions. Raises: ModelError if transformer-lens is not installed."""
        try:
            from cacheprobe.models.hf.hooked import ActivationCache
        except ImportError as absent:
            raise ModelError("an ActivationCache needs transformer-lens; pip install transformer-lens") from absent
        named = {hook_name(site, layer): value[None] for (site, layer), value in states.items()}
        for (site, layer), value in states.items():
            if site == "S" and layer + 1 < self.n_layers:
                named[resid_pre_name(layer + 1)] = value[None]
        return ActivationCache(named, self.model, has_batch_dim=True)


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


def _titled(live: LiveModule, name: str) -> str:
    """Returns the model's name with its class, once if they are equal."""
    kind = type(live).__name__
    return kind if name == kind else f"{name}: {kind}"


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
