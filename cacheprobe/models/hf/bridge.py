"""TransformerLens' TransformerBridge as a CachedLM.

This file contains no code for requests, phases or the storage of captured states.
"""

import inspect
from collections.abc import Sequence
from functools import cached_property
from importlib.metadata import version

import torch
from torch import Tensor
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources import build_bridge_from_module

from cacheprobe.core.hook_names import ROTATED, hook_name, resid_pre_name
from cacheprobe.core.live import LiveConfig, LiveModule, LiveTokenizer
from cacheprobe.kvcache.cache import KVCache
from cacheprobe.models.base import ModelError
from cacheprobe.models.facts import one_dtype, stop_token_ids
from cacheprobe.models.hf.cache import ShapeProbe, staged
from cacheprobe.models.hf.float64 import keeping_float64
from cacheprobe.models.hf.hooked_lm import HookedLM
from cacheprobe.models.output_parts import HeadWriter, OutputParts, head_weights
from cacheprobe.models.settings import evaluating, numeric_settings
from cacheprobe.models.turns import one_at_a_time
from cacheprobe.ops.compiled.readout import Compiled
from cacheprobe.ops.wide_product import wide_product, wide_rows, widening

_WRAPPED = "_cacheprobe_bridge"
"""Key in a live model's own dictionary for the bridge that wraps the model, and the checksum of its weights at that
time."""


class BridgeLM(HookedLM):
    """A TransformerBridge that runs on our KV cache.

    Twin: the bridge's own uncached forward, close(1e-5) in float32: `models.checks` compares them at load.
    """

    def __init__(self, bridge: TransformerBridge, name: str, weights_note: str = "") -> None:
        self.bridge = self.hooked_module = bridge
        self.name, self.weights_note = name, weights_note
        self.adapter = ""  # what load_model merged into the weights
        self.compiled: Compiled | None = None  # where load_model was asked for it
        cfg = bridge.cfg
        self.n_layers, self.d_model, self.d_vocab = int(cfg.n_layers), int(cfg.d_model), int(cfg.d_vocab)
        self.n_ctx = int(cfg.n_ctx)
        self.head_shape = (int(cfg.n_heads), int(cfg.d_head))
        self.dtype, self.device = one_dtype(bridge, name), next(bridge.parameters()).device
        self.tokenizer = bridge.tokenizer
        self.stop_token_ids = stop_token_ids(bridge)
        self.checksum_at_load = self.weights_checksum
        self.fast_trial: object = None  # kept by models.paths
        points = bridge.hook_dict
        if self.dtype != torch.float32:
            _keep_dtype_when_rotated(points, self.dtype)
        needed = [hook_name(site, layer) for layer in range(self.n_layers) for site in "STC"] + [resid_pre_name(0)]
        if missing := [name for name in needed if name not in points]:
            raise ModelError(
                f"{name}: TransformerLens gives this architecture no hook {missing[0]}; it cannot be captured"
            )

    @classmethod
    def wrap(cls, model: LiveModule, tokenizer: LiveTokenizer, name: str, weights_note: str = "") -> "BridgeLM":
        """Wraps a live transformers model in place: the bridge replaces its submodules. A model wrapped before reuses
        its bridge.

        Raises: ModelError for an architecture without a bridge, and for a model inside a bridge that was created
        elsewhere.
        """
        architecture = type(model).__name__
        model.eval()
        if (known := vars(model).get(_WRAPPED)) is not None:
            bridge, checksum = known
            wrapped = cls(bridge, name, weights_note)
            wrapped.checksum_at_load = checksum
            wrapped.tokenizer = wrapped.tokenizer if tokenizer is None else tokenizer
            return wrapped
        if any(type(module).__module__.startswith("transformer_lens") for module in model.modules()):
            raise ModelError(f"{name}: the {architecture} is already inside a TransformerBridge; give the bridge")
        try:
            bridge = build_bridge_from_module(
                model, architecture, hf_config=model.config, tokenizer=tokenizer, model_name=name
            )
        except (ValueError, TypeError, KeyError, NotImplementedError, AttributeError) as error:
            raise ModelError(f"{name}: TransformerBridge does not take {architecture}: {error}") from error
        wrapped = cls(bridge, name, weights_note)
        vars(model)[_WRAPPED] = bridge, wrapped.checksum_at_load  # no attribute: it would become a submodule
        return wrapped

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"BridgeLM({self.name}, {self.n_layers} layers, d_model {self.d_model}, {dtype}, {self.device})"

    @property
    def layer_shapes(self) -> list[tuple[int, int, int]]:
        """(heads, key width, value width) of each layer's cache."""
        return [self._layers_seen.layer_shapes[layer] for layer in range(self.n_layers)]

    @property
    def layer_devices(self) -> list[torch.device]:
        """The device on which each layer computes its keys and values, and therefore stores its part of the cache."""
        return [self._layers_seen.devices[layer] for layer in range(self.n_layers)]

    @cached_property
    @one_at_a_time()
    def _layers_seen(self) -> ShapeProbe:
        """Each layer's cache shape and device, found in one short forward."""
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

    attends_by_request = False

    def check_settings(self, window: int) -> None:
        """Accepts every window."""

    def new_cache(self, num_rows: int, capacity: int) -> KVCache:
        """Returns an empty KVCache for `rows` sequences of at most `capacity` tokens."""
        return KVCache(num_rows, capacity, self.layer_shapes, self.dtype, self.layer_devices)

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
    ) -> Tensor:
        """Runs one forward through the bridge, as CachedLM.forward describes."""
        if num_layers == self.n_layers:  # the bridge would go on to the logits
            return self._last_residual(token_ids, cache, cache_rows, starts)
        stop: dict[str, LiveModule] = {"stop_at_layer": num_layers}
        choice = self.logit_choice(logit_slots) if num_layers is None else stop
        placed = staged(cache, cache_rows, starts, token_ids.shape[1], self.config, self.n_ctx)
        with placed as inputs, keeping_float64(self.dtype), evaluating(self.bridge.original_model):
            out = self.bridge.forward(token_ids.to(self.device), return_type="logits", **inputs, **choice)
        return out if logit_slots is None or choice else out[:, list(logit_slots)]

    def logit_choice(self, logit_slots: Sequence[int] | None) -> dict[str, LiveModule]:
        """Returns the argument by which the wrapped model computes the logits of these slots alone; {} if no slots are
        given or it has no such argument."""
        if logit_slots is None or not self._can_choose_logits:
            return {}
        return {"logits_to_keep": torch.tensor(list(logit_slots), device=self.device)}

    def _last_residual(
        self, token_ids: Tensor, cache: KVCache, cache_rows: Sequence[int], starts: Sequence[int]
    ) -> Tensor:
        kept: list[Tensor] = []
        with self.capturing([("S", self.n_layers - 1)], lambda site, layer, value: kept.append(value.clone())):
            self.forward(token_ids, cache, cache_rows, starts, logit_slots=[0])
        return kept[0]

    @property
    def config(self) -> LiveConfig:
        """The wrapped model's own config."""
        return self.bridge.original_model.config

    @cached_property
    def _can_choose_logits(self) -> bool:
        return "logits_to_keep" in inspect.signature(type(self.bridge.original_model).forward).parameters

    def output_parts(self) -> OutputParts:
        """Returns the final norm, the unembedding and its bias separately."""
        finish = self.bridge.adapter.apply_output_logits_transform
        unembed = self.bridge.unembed
        return OutputParts(self.bridge.ln_final.original_component, unembed.W_U.T, unembed.b_U, finish)

    def head_writer(self, layer: int) -> HeadWriter:
        """Returns the output projection of a layer's heads, split by head, and the norm after the projection if there
        is one.

        Raises: ModelError if the layer has no such projection.
        """
        attention: LiveModule = self.bridge.blocks[layer].attn
        projection: LiveModule = getattr(getattr(attention, "o", None), "original_component", None)
        if not hasattr(projection, "weight"):
            raise ModelError(f"{self.name}: the heads of layer {layer} have no output projection to be told apart by")
        place, _, _ = str(self.bridge.hook_dict[hook_name("T", layer)].name).rpartition(".")
        behind: LiveModule = self.bridge.get_submodule(place)
        norm = None if behind is attention else behind.original_component
        return HeadWriter(head_weights(projection, self.head_shape[0]), projection.bias, norm)

    @one_at_a_time()
    @torch.inference_mode()
    def read_out(self, states: Tensor) -> Tensor:
        """Returns logits [n, v] of residual states [n, m], including the architecture's softcaps and logit scales.

        Twin: read_out_with_gradients, equal, but to one unit in the last place if many rows are computed in float32.
        """
        from_rows = wide_rows(self.dtype, self.device)
        if from_rows is None:
            return self.read_out_with_gradients(states)
        _, weight, bias, finish = self.output_parts()
        return finish(wide_product(self.bridge.ln_final(states[None]), weight, bias, from_rows))[0]

    def read_out_with_gradients(self, states: Tensor) -> Tensor:
        """Returns the same numbers as `read_out`, for training: gradients flow back into `states`."""
        with keeping_float64(self.dtype):
            logits = self.bridge.unembed(self.bridge.ln_final(states[None]))
            return self.bridge.adapter.apply_output_logits_transform(logits)[0]

    def fingerprint(self) -> dict[str, str | int | float]:
        """Returns every property of the model and its platform that may change the bits of a result."""
        return {
            "model": self.name,
            **({"adapter": self.adapter} if self.adapter else {}),
            "weights_sha256": self.weights_sha256,
            "architecture": type(self.bridge.original_model).__name__,
            "path": "bridge",
            "attention": "eager (TransformerBridge)",
            "compatibility_mode": bool(getattr(self.bridge, "compatibility_mode", False)),
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": ", ".join(dict.fromkeys(map(str, self.layer_devices))),
            "readings_in_float32": widening(wide_rows(self.dtype, self.device)),
            **({"readings_compiled": self.compiled.readout.digest} if self.compiled else {}),
            "transformer_lens": version("transformer-lens"),
            **numeric_settings(),
        }


def _keep_dtype_when_rotated(points: dict[str, HookPoint], dtype: torch.dtype) -> None:
    """Rounds rotated queries and keys to the model's dtype, as transformers does.

    If the rotary table is in float32 (Olmo2), the bridge leaves them in float32, and products with our 16-bit values
    fail.
    """

    def rounded(tensor: Tensor, *, hook: HookPoint) -> Tensor | None:
        """Returns the value in the model's dtype, None if unchanged."""
        return tensor.to(dtype) if tensor.dtype != dtype else None

    for name, point in points.items():
        is_ours = any(getattr(handle.user_hook, "__module__", "") == __name__ for handle in point.fwd_hooks)
        if name.endswith(ROTATED) and not is_ours:
            point.add_perma_hook(rounded)
