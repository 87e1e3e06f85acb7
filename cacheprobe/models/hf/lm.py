"""Implements the members of CachedLM that cacheprobe's models share, and those of the models around a transformers
model: reading of states, fingerprint, caches."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import starmap

import torch
from torch import Tensor, nn

from cacheprobe.core.devices import upload
from cacheprobe.core.hook_names import hook_name, is_module, resid_pre_name
from cacheprobe.core.live import LiveConfig, LiveModule, LiveTokenizer
from cacheprobe.core.values import hint
from cacheprobe.kvcache.cache import KVCache
from cacheprobe.kvcache.recurrent import LayerStates, RecurrentCache
from cacheprobe.kvcache.staged import PassAttention, StagedCache
from cacheprobe.models.base import ModelError, OutputParts, StateEdit, StateSink
from cacheprobe.models.experts import EXPERTS, MixtureLayer, capturing_routing, editing_routers, split
from cacheprobe.models.fast.operations import without_operations
from cacheprobe.models.hf.modules import TokenRows
from cacheprobe.models.hf.text import TokenText
from cacheprobe.models.quantised.packed import quantised_text
from cacheprobe.models.settings import keeping_float64, model_lock, numeric_settings, one_at_a_time
from cacheprobe.models.weights import (
    buffers_sha256,
    checksum_once,
    one_dtype,
    output_rows,
    rms_norm_of,
    sha256_of,
    stop_ids,
)
from cacheprobe.ops.compiled.operations import READ_IN_LOOPS, TORCH, CompiledOperations, CompiledReadout
from cacheprobe.ops.compiled.queue import LLAMA
from cacheprobe.ops.kernel_set import KernelSet
from cacheprobe.ops.readout import Readout


class BaseLM(TokenText, TokenRows, ABC):
    """Implements members of CachedLM that BridgeLM, PlainLM and ThinkingLM share."""

    live: LiveModule
    """The module that owns the weights."""
    hooked_module: LiveModule
    """The module that an ActivationCache of TransformerLens belongs to."""
    n_layers: int
    d_model: int
    n_ctx: int
    device: torch.device
    injected_layers: tuple[int, ...] = ()
    mixtures: Mapping[int, MixtureLayer] = {}
    """Mixtures of experts by layer."""
    _hashed = "", ""
    """(checksum of the weights, SHA-256 of the weights at that checksum); empty texts before the first use."""

    def check_settings(self, window: int) -> None:
        """Does nothing: the model supports verify passes with any number of tokens."""

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
        with one_at_a_time(), torch.inference_mode():  # decorators would be two more frames of every pass
            self.token_shape = (token_ids.shape[0], token_ids.shape[1])
            staged = StagedCache(cache, cache_rows, starts, token_ids.shape[1], attention, token_ids.cpu())
            try:
                return self._forward(staged.placed(self.device).token_ids, staged, num_layers, logit_slots)
            finally:
                self.token_shape = (0, 0)

    @abstractmethod
    def _forward(
        self, token_ids: Tensor, cache: StagedCache, num_layers: int | None, logit_slots: Sequence[int] | None
    ) -> Tensor:
        """Returns what `forward` returns. token_ids: [b, t], on the model's device."""

    @abstractmethod
    def output_parts(self) -> OutputParts:
        """Returns the steps from the last residual stream to the logits as OutputParts: final norm, unembedding matrix
        [v, m], bias, and the architecture's softcap or scale."""

    @property
    def unembedding(self) -> Tensor:
        """Unembedding matrix [v, m], which maps the normalised residual stream to logits. The tensor is the model's
        own, not a copy."""
        return self.output_parts().weight

    def to_activation_cache(self, states: dict[tuple[str, int], Tensor]) -> object:
        """Returns the given states as TransformerLens' ActivationCache. states: (site, layer) -> tensor [p, m] of p
        positions. The residual stream after a block (site S) also appears as the input of the next block, unless the
        model adds something there. Raises: ModelError if transformer-lens is not installed."""
        try:
            from cacheprobe.models.hf.hooked import ActivationCache
        except ImportError as absent:
            raise ModelError("an ActivationCache needs transformer-lens; pip install transformer-lens") from absent
        named = {hook_name(site, layer): value[None] for (site, layer), value in states.items()}
        for (site, layer), value in states.items():
            if site == "S" and layer + 1 < self.n_layers and layer + 1 not in self.injected_layers:
                named[resid_pre_name(layer + 1)] = value[None]  # what leaves a block enters the next
        return ActivationCache(named, self.hooked_module, has_batch_dim=True)

    def named_weights(self) -> Sequence[tuple[str, Tensor]]:
        """Returns all parameters with their names, sorted by name."""
        return sorted(self.live.named_parameters(), key=lambda item: item[0])

    @property
    def weights_checksum(self) -> str:
        """Checksum of all parameters as hex text, computed at every access; inside `hashing_once`, at the first."""
        return checksum_once(self, self.named_weights())

    @property
    def weights_sha256(self) -> str:
        """First 16 hex digits of a SHA-256 over all parameters, sorted by name; computed again if the checksum has
        changed."""
        if self._hashed[0] != (checksum := self.weights_checksum):
            self._hashed = checksum, sha256_of(self.named_weights())
        return self._hashed[1]


class HookedSites(BaseLM):
    """Captures and edits activations at the hook points of `hooked_module`, a TransformerBridge or HookedRootModule.
    Base class of BridgeLM and ThinkingLM."""

    @contextmanager
    def capturing(self, sites: Sequence[tuple[str, int]], sink: StateSink) -> Iterator[None]:
        """Returns a context manager. Inside its `with`, a forward calls `sink(site, layer, activation)` for each (site,
        layer) pair of `sites` whose layer it runs. At the end only these hooks are removed."""

        def keep(site: str, layer: int, value: Tensor) -> None:
            """Calls the sink and returns None, so that the activation stays unchanged."""
            sink(site, layer, value)

        others, routers = split(sites)
        with self._hooked(others, keep), capturing_routing(self.name, self.mixtures, routers, sink):
            yield

    @contextmanager
    def editing(self, sites: Sequence[tuple[str, int]], edit: StateEdit) -> Iterator[None]:
        """Returns a context manager. Inside its `with`, a forward calls `edit(site, layer, activation)` for each (site,
        layer) pair of `sites` whose layer it runs. A returned tensor replaces the activation; None leaves the
        activation unchanged."""
        others, routers = split(sites)
        with self._hooked(others, edit), editing_routers(self.name, self.mixtures, routers, edit):
            yield

    @contextmanager
    def _hooked(self, sites: Sequence[tuple[str, int]], edit: StateEdit) -> Iterator[None]:
        self._check_sites(sites)
        hooks = [(_point(*site), partial(_edit_at, self._of_tokens(edit, *site), *site)) for site in sites]
        with model_lock, self.hooked_module.hooks(fwd_hooks=hooks):
            yield

    def _check_sites(self, sites: Sequence[tuple[str, int]]) -> None:
        points = self.hooked_module.hook_dict  # the bridge makes it anew at every access
        if missing := [name for name in starmap(_point, sites) if name not in points]:
            remedy = f"{hint(missing[0], points)}; modules of transformers have hooks with path='plain' alone"
            raise ModelError(f"{self.name} has no hook {missing[0]}{remedy if is_module(missing[0]) else ''}")

    def _of_tokens(self, edit: StateEdit, site: str, layer: int) -> StateEdit:
        """Returns `edit`; for a hook point that is no site of ours, with a check that it has an entry for each
        token."""
        if not is_module(site):
            return edit
        return lambda site, layer, value: self.edit_tokens(site, partial(edit, site, layer), value)


def _point(site: str, layer: int) -> str:
    """Returns the hook point of a site, or the one that the site names itself."""
    return site if is_module(site) else hook_name(site, layer)


def _edit_at(edit: StateEdit, site: str, layer: int, value: Tensor, hook: object) -> Tensor | None:
    return edit(site, layer, value)


@dataclass(frozen=True)
class Head:
    """Holds the steps from the last block's output to the logits."""

    norm: nn.Module
    unembed: nn.Module
    finish: Callable[[Tensor], Tensor]


class HuggingFaceLM(BaseLM):
    """Implements members of CachedLM that BridgeLM and PlainLM share."""

    adapter = ""
    """The adapter that load_model merged into the weights."""
    operations: CompiledOperations | KernelSet | None = None
    """Set by load_model; None for torch's."""
    logits_readout: CompiledReadout | None = None
    """Set by load_model where torch computes the products and loops read the logits."""
    head: Head
    sources: Mapping[int, int] = {}
    """Layer without keys and values of its own -> the layer whose keys and values it reads."""
    initial: Mapping[int, LayerStates] = {}
    """Recurrent layer -> its states before the first token."""

    def __init__(self, live: LiveModule, tokenizer: LiveTokenizer, name: str, note: str) -> None:
        self.live, self.tokenizer, self.name, self.weights_note = live, tokenizer, name, note
        self.dtype, self.device = one_dtype(live, name), next(live.parameters()).device
        self.stop_token_ids, self.stop_source = stop_ids(live, tokenizer)

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        dims = f"{self.n_layers} layers, d_model {self.d_model}"
        by = f", {self.computed_by}" if self.computed_by else ""
        return f"{type(self).__name__}({self.name}, {dims}, {dtype}, {self.device}{by})"

    @property
    def computed_by(self) -> str:
        """Text that says what computes each operation on a GPU, or in Triton's interpreter; "" on a CPU."""
        if isinstance(self.operations, KernelSet):
            return self.operations.summary
        return "by torch" if self.device.type == "cuda" else ""

    @property
    def config(self) -> LiveConfig:
        """Config of the transformers model."""
        return self.live.config

    @abstractmethod
    def cache_layers(self) -> tuple[Sequence[tuple[int, int, int]], Sequence[torch.device]]:
        """Returns (number of key and value heads, key width, value width) of each layer's cache, and the device of each
        layer's keys and values: the device on which the layer computes them."""

    def new_cache(self, num_rows: int, capacity: int) -> KVCache:
        """Returns an empty KVCache with this model's layer shapes: `num_rows` cache rows, one for each sequence, of
        `capacity` token slots each, without heads in layers that attend over another layer's keys; a RecurrentCache if
        the model has recurrent layers."""
        layer_shapes, devices = self.cache_layers()
        shapes = [(0, 0, 0) if i in self.sources else shape for i, shape in enumerate(layer_shapes)]
        if self.initial:
            return RecurrentCache(num_rows, capacity, shapes, self.dtype, devices, self.initial)
        cache = KVCache(num_rows, capacity, shapes, self.dtype, devices)
        if isinstance(self.operations, KernelSet):
            cache.writer = self.operations.store
        return cache

    @abstractmethod
    def whole_forward(self, token_ids: Tensor) -> Tensor:
        """Returns the logits [b, t, v] of one forward without our cache, masks or positions, with the model's own
        attention and experts. Gradients flow back into what `editing` put into it."""

    @one_at_a_time()
    @torch.inference_mode()
    def whole_logits(self, token_ids: Tensor) -> Tensor:
        """Returns the logits [b, t, v] of `whole_forward`, without gradients."""
        return self.whole_forward(token_ids.to(self.device))

    def original_logits(self, token_ids: Tensor) -> Tensor:
        """Returns what `whole_logits` must equal: here, its own result."""
        return self.whole_logits(token_ids)

    def logit_choice(self, logit_slots: Sequence[int] | None) -> dict[str, LiveModule]:
        """Returns the keyword argument {"logits_to_keep": slots} that makes the transformers model compute logits only
        for the tokens at these indices; {} if `logit_slots` is None, and for a model without such an argument or over
        several devices."""
        if logit_slots is None or not self._can_choose_logits:
            return {}
        return {"logits_to_keep": upload(self.device, [torch.tensor(logit_slots)])[0]}

    @cached_property
    def _can_choose_logits(self) -> bool:
        has_argument = "logits_to_keep" in inspect.signature(type(self.live).forward).parameters
        return has_argument and len({weight.device for weight in self.live.parameters()}) == 1

    def output_parts(self) -> OutputParts:
        """Returns the steps from the last residual stream to the logits as OutputParts."""
        unembed: LiveModule = self.head.unembed
        return OutputParts(without_operations(self.head.norm), output_rows(unembed), unembed.bias, self.head.finish)

    @one_at_a_time()
    @torch.inference_mode()
    def read_out(self, states: Tensor) -> Tensor:
        """Returns logits [n, v] of residual states [n, m], including the architecture's softcaps and logit scales.
        Records no gradients.

        Twin: read_out_with_gradients, to one unit in the last place, since compiled loops sum in another order.
        """
        if self.operations is None or self._head_is_hooked:
            return self.read_out_with_gradients(states)
        _, weight, bias, finish = self.output_parts()
        added = bias if bias is not None and bool(bias.any()) else None
        return finish(self.operations.product(self._after_last_norm(states)[None], weight, added))[0]

    @one_at_a_time()
    @torch.inference_mode()
    def read_tokens(self, states: Tensor, target_token_ids: Tensor, top_k: int) -> Readout | None:
        """Returns the Readout of `read_out`'s logits of residual states [n, m], without storing the logits; None if
        that cannot be done: torch computes the products, or the architecture scales its logits.

        target_token_ids: [n], -1 for none.
        Twin: ops.readout.read_logits of `read_out`, ids and ranks ==, numbers close(1e-5).
        """
        if self.operations is None or (cap := self._logit_cap) is None or self._head_is_hooked:
            return None
        _, weight, bias, _ = self.output_parts()
        given = self._after_last_norm(states), weight, bias if bias is not None and bool(bias.any()) else None
        if isinstance(self.operations, CompiledOperations):
            return self.operations.readout.of_states(*given, target_token_ids, top_k, cap)
        return None if cap else self.operations.readout.of_states(*given, target_token_ids, top_k)

    def _after_last_norm(self, states: Tensor) -> Tensor:
        """Returns residual states [n, m] after the final norm, with the bits of the forward that the operations
        compute."""
        states, norm = states.to(self.device), rms_norm_of(self.output_parts().norm)
        if norm is not None and states.dtype == norm.weight.dtype:
            if isinstance(self.operations, CompiledOperations):
                return self.operations.norm(states, *norm)
            if isinstance(self.operations, KernelSet) and norm.kind == LLAMA:
                return self.operations.norm(states, norm.weight, norm.eps)
        return self.head.norm(states[None])[0]

    @property
    def _head_is_hooked(self) -> bool:
        """Whether a PyTorch hook acts on the final norm or the unembedding, which then compute the readings too."""
        return any(module._forward_hooks or module._forward_pre_hooks for module in (self.head.norm, self.head.unembed))

    @cached_property
    def _logit_cap(self) -> float | None:
        """The soft cap of the architecture's logits; 0 if it neither caps nor scales them, None for another change."""
        some = torch.linspace(-100, 100, 64, dtype=self.dtype, device=self.device).view(1, 1, -1)
        finished = self.head.finish(some.clone())
        if torch.equal(finished, some):
            return 0.0
        caps = (getattr(self.config, name, None) for name in ("final_logit_softcapping", "output_logit_soft_cap"))
        found = (float(cap) for cap in caps if cap and torch.equal((some / cap).tanh() * cap, finished))
        return next(found, None)

    def read_out_with_gradients(self, states: Tensor) -> Tensor:
        """Returns the logits of `read_out`, up to one unit in the last place, and lets gradients flow back into
        `states`."""
        with keeping_float64(self.dtype):
            normed = without_operations(self.head.norm)(states.to(self.device)[None])
            logits = self.head.finish(without_operations(self.head.unembed)(normed))[0]
            return logits.to(self.device)  # of a model on several devices

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
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": ", ".join(dict.fromkeys(map(str, self.cache_layers()[1]))),
            "readings": self.operations.text if self.operations else READ_IN_LOOPS if self.logits_readout else TORCH,
            **({"experts": EXPERTS} if self.mixtures else {}),
            **self.fingerprint_of_path(),
            **numeric_settings(),
        }

    @abstractmethod
    def fingerprint_of_path(self) -> dict[str, str | int | float]:
        """Returns what a fingerprint says of the path: its name, its attention, and what else it depends on."""
