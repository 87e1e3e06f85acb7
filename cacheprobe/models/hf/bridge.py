"""Wraps TransformerLens' TransformerBridge as a CachedLM, the interface of a model that the engine runs.

This file contains no code for requests, phases or the storage of captured states.
"""

import copy
from collections.abc import Sequence
from functools import cached_property
from importlib.metadata import version

import torch
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformer_lens.model_bridge.sources._bridge_builder import detect_tokenizer_bos_eos
from transformers import AutoTokenizer

from cacheprobe.core.hook_names import ROTATED, SITES, hook_name, resid_pre_name
from cacheprobe.core.live import LiveModule, LiveTokenizer
from cacheprobe.kvcache.staged import StagedCache
from cacheprobe.models.base import HeadWriter, ModelError, OutputParts
from cacheprobe.models.experts import own_experts, use_invariant_experts
from cacheprobe.models.hf.cache import KVCacheAdapter, ShapeProbe, forward_inputs
from cacheprobe.models.hf.lm import Head, HookedSites, HuggingFaceLM
from cacheprobe.models.hf.masks import context_length, text_config
from cacheprobe.models.hf.shared import bridge_around, remember_bridge, require_dense, require_no_other_bridge
from cacheprobe.models.settings import evaluating, keeping_float64, one_at_a_time
from cacheprobe.models.weights import head_weights, output_rows
from cacheprobe.ops.kernel_set import KernelSet


class BridgeLM(HookedSites, HuggingFaceLM):
    """Runs a TransformerBridge on our KVCache, as a CachedLM. Hooks on the bridge may edit activations.

    Twin: the bridge's own uncached forward, close(1e-5) in float32; `models.checks` compares both at load, to 1e-3.
    """

    path = "bridge"
    attends_by_request = False
    plain: HuggingFaceLM | None = None
    """The plain model of the same weights; None if the bridge alone runs them."""

    def __init__(
        self, bridge: TransformerBridge, name: str, weights_note: str = "", tokenizer: LiveTokenizer = None
    ) -> None:
        super().__init__(bridge.original_model, tokenizer, name, weights_note)
        self.bridge = self.hooked_module = bridge
        norm: nn.Module = getattr(bridge, "ln_final", nn.Identity())  # the first GPT has none
        self.head = Head(norm, bridge.unembed, bridge.adapter.apply_output_logits_transform)
        cfg = bridge.cfg
        self.n_layers, self.d_model, self.d_vocab = int(cfg.n_layers), int(cfg.d_model), int(cfg.d_vocab)
        self.n_ctx = context_length(text_config(self.live.config))
        self.head_shape = (int(cfg.n_heads), int(cfg.d_head))
        self.mixtures = use_invariant_experts(self.live, None)
        points = bridge.hook_dict
        if self.dtype != torch.float32:
            _keep_dtype_when_rotated(points, self.dtype)
        needed = [hook_name(site, layer) for layer in range(self.n_layers) for site in SITES] + [resid_pre_name(0)]
        if missing := [name for name in needed if name not in points]:
            raise ModelError(
                f"{name}: TransformerLens gives this architecture no hook {missing[0]}; it cannot be captured"
            )

    @classmethod
    def wrap(cls, model: LiveModule, tokenizer: LiveTokenizer, name: str, weights_note: str = "") -> "BridgeLM":
        """Returns a BridgeLM around a live transformers model. Changes the model in place: the bridge replaces its
        submodules. A model that was wrapped before keeps its first bridge.

        Raises: ModelError for an architecture without a bridge, and for a model inside a bridge that was created
        elsewhere.
        """
        architecture = type(model).__name__
        require_dense(model, name)
        if (bridge := bridge_around(model)) is None:
            require_no_other_bridge(model, name)
            try:
                bridge = build_bridge_from_module(model, architecture, hf_config=model.config, model_name=name)
            except (ValueError, TypeError, KeyError, NotImplementedError, AttributeError) as error:
                raise ModelError(f"{name}: TransformerBridge does not take {architecture}: {error}") from error
            if tokenizer is not None:
                _give_tokenizer(bridge, tokenizer)
            remember_bridge(model, bridge)
        return cls(bridge, name, weights_note, tokenizer)

    @property
    def layer_shapes(self) -> list[tuple[int, int, int]]:
        """(number of key and value heads, key width, value width) of each layer's cache, as a list. The first access
        runs a short forward."""
        return [self._layers_seen.layer_shapes[layer] for layer in range(self.n_layers)]

    def cache_layers(self) -> tuple[list[tuple[int, int, int]], list[torch.device]]:
        """Returns `layer_shapes`, and the device of each layer's keys and values. The first call runs a short
        forward."""
        return self.layer_shapes, [self._layers_seen.devices[layer] for layer in range(self.n_layers)]

    @cached_property
    @one_at_a_time()
    def _layers_seen(self) -> ShapeProbe:
        """Shapes and devices of all layers' keys and values (a ShapeProbe). The first access runs a short forward."""
        probe = ShapeProbe()
        zero = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        mask = torch.zeros(1, 1, 1, 1, dtype=self.dtype, device=self.device)
        with torch.inference_mode():
            self.bridge.forward(
                zero, return_type="logits", past_key_values=probe, attention_mask=mask, position_ids=zero
            )
        if sorted(probe.layer_shapes) != list(range(self.n_layers)):
            raise ModelError(
                f"{self.name}: layers {sorted(probe.layer_shapes)} of {self.n_layers} keep keys and values; a model "
                "with another kind of memory has no rollback here, use a decoder with full attention in every layer"
            )
        return probe

    def _forward(
        self, token_ids: Tensor, cache: StagedCache, num_layers: int | None, logit_slots: Sequence[int] | None
    ) -> Tensor:
        if num_layers == self.n_layers:  # the bridge would go on to the logits
            kept: list[Tensor] = []
            with self.capturing([("S", self.n_layers - 1)], lambda site, layer, value: kept.append(value.clone())):
                self._forward(token_ids, cache, None, [0])
            return kept[0]
        stop_early: dict[str, LiveModule] = {"stop_at_layer": num_layers}
        choice = self.logit_choice(logit_slots) if num_layers is None else stop_early
        inputs = forward_inputs(cache, self.config, self.n_ctx)
        with keeping_float64(self.dtype), evaluating(self.live):
            settings = {"return_type": "logits", "past_key_values": KVCacheAdapter(cache), **inputs, **choice}
            out = self.bridge.forward(token_ids, **settings)
        return out if logit_slots is None or choice else out[:, list(logit_slots)]

    def whole_forward(self, token_ids: Tensor) -> Tensor:
        """Returns the logits [b, t, v] of one forward of the bridge without our cache, masks or positions, with the
        model's own experts. Gradients flow back into what `editing` put into it."""
        with own_experts(self.mixtures), evaluating(self.live):
            return self.bridge.forward(token_ids, return_type="logits")

    @property
    def computed_by(self) -> str:
        """Text that says what computes each operation on a GPU, or in Triton's interpreter; "" on a CPU."""
        by = super().computed_by
        return f"blocks by torch, the rest by {by}" if isinstance(self.operations, KernelSet) else by

    def output_parts(self) -> OutputParts:
        """Returns the steps from the last residual stream to the logits as OutputParts: final norm, unembedding matrix
        [v, m], bias, and the architecture's softcap or scale."""
        unembed, norm = self.bridge.unembed, self.head.norm
        norm = getattr(norm, "original_component", norm)
        return OutputParts(norm, unembed.W_U.T, unembed.b_U, self.head.finish)

    def head_writer(self, layer: int) -> HeadWriter:
        """Returns the steps from one layer's attention heads to the residual stream as a HeadWriter: output projection
        split by head [h, d, m], bias, and the norm after the projection (None if the model has none).

        Raises: ModelError if the layer has no such projection.
        """
        attention: LiveModule = self.bridge.blocks[layer].attn
        projection: LiveModule = getattr(getattr(attention, "o", None), "original_component", None)
        if not hasattr(projection, "weight"):
            raise ModelError(f"{self.name}: the heads of layer {layer} have no output projection to be told apart by")
        component_path, _, _ = str(self.bridge.hook_dict[hook_name("T", layer)].name).rpartition(".")
        component: LiveModule = self.bridge.get_submodule(component_path)
        norm = None if component is attention else component.original_component
        heads = output_rows(projection).shape[1] // self.layer_shapes[layer][2]
        return HeadWriter(head_weights(projection, heads), projection.bias, norm)

    def named_weights(self) -> Sequence[tuple[str, Tensor]]:
        """Returns all parameters with their names, sorted by name; in place of those that the bridge shares with its
        plain model, those of the plain model."""
        if self.plain is None:
            return super().named_weights()
        named = self.plain.named_weights()
        shared = {weight.untyped_storage().data_ptr() for _, weight in named}
        own = [one for one in super().named_weights() if one[1].untyped_storage().data_ptr() not in shared]
        return [*named, *own]

    def fingerprint_of_path(self) -> dict[str, str | int | float]:
        """Returns what a fingerprint says of the bridge: its attention, its version."""
        return {
            "path": "bridge",
            "attention": "eager (TransformerBridge)",
            "compatibility_mode": bool(self.bridge.compatibility_mode),
            "transformer_lens": version("transformer-lens"),
        }


def _give_tokenizer(bridge: TransformerBridge, tokenizer: LiveTokenizer) -> None:
    """Gives a bridge a copy of a tokenizer, for the bridge's own methods that take text. TransformerLens itself would
    load the tokenizer's files again with a start token, and set tokens that the tokenizer lacks."""
    own = copy.deepcopy(tokenizer)
    own.pad_token = own.pad_token or own.eos_token
    bridge.tokenizer = own
    bridge.cfg.tokenizer_prepends_bos, bridge.cfg.tokenizer_appends_eos = detect_tokenizer_bos_eos(own)


def tokenizer_of_owner(bridge: TransformerBridge) -> LiveTokenizer:
    """Returns the tokenizer of a user's TransformerBridge as its files configure it; None if the bridge has none.

    TransformerLens loads the files again with add_bos_token=True. The bridge's own object is returned if it was not
    loaded so, if the files are not on this machine, or if they hold another vocabulary or ask for a start token too.
    """
    found = bridge.tokenizer
    if found is None or getattr(found, "init_kwargs", {}).get("add_bos_token") is not True:
        return found
    try:
        stored = AutoTokenizer.from_pretrained(found.name_or_path, local_files_only=True)
    except (OSError, ValueError):
        return found
    return stored if stored.get_vocab() == found.get_vocab() else found


def _keep_dtype_when_rotated(points: dict[str, HookPoint], dtype: torch.dtype) -> None:
    """Adds permanent hooks to `points` that round queries and keys to `dtype` after the rotary embedding."""

    def rounded(tensor: Tensor, *, hook: HookPoint) -> Tensor | None:
        """Returns the tensor in the model's dtype; None if the tensor has that dtype already."""
        return tensor.to(dtype) if tensor.dtype != dtype else None

    for name, point in points.items():
        is_ours = any(handle.user_hook.__module__ == __name__ for handle in point.fwd_hooks)
        if name.endswith(ROTATED) and not is_ours:
            point.add_perma_hook(rounded)
