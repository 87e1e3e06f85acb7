"""TransformerLens' TransformerBridge as a CachedLM. The only file that imports transformer_lens.

Knows nothing about requests, phases or what is kept of the captured states.
"""

import hashlib
import inspect
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
import transformer_lens
import transformers
from torch import Tensor
from transformer_lens import ActivationCache
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources import build_bridge_from_module

from cacheprobe.cache.kv import KVCache
from cacheprobe.models.base import ModelError, StateSink
from cacheprobe.models.hf_cache import ShapeProbe, staged
from cacheprobe.names import hook_name, resid_pre_name


class BridgeLM:
    """A TransformerBridge that runs on our KV cache.

    Twin: the bridge's own uncached forward, close(1e-5) in float32: `models.checks` compares them at load.
    """

    def __init__(self, bridge: TransformerBridge, name: str, weights_note: str = "") -> None:
        self.bridge, self.name, self.weights_note = bridge, name, weights_note
        cfg = bridge.cfg
        self.n_layers, self.d_model, self.d_vocab = int(cfg.n_layers), int(cfg.d_model), int(cfg.d_vocab)
        self.n_ctx = int(cfg.n_ctx)
        self.dtype, self.device = _one_dtype(bridge, name), next(bridge.parameters()).device
        self.tokenizer = bridge.tokenizer
        self.stop_token_ids = _stop_token_ids(bridge)
        self._hashed: tuple[object, str] | None = None
        missing = [n for n in self._hook_names() if n not in bridge.hook_dict]
        if missing:
            raise ModelError(
                f"{name}: TransformerLens gives this architecture no hook {missing[0]}; it cannot be captured"
            )

    @classmethod
    def wrap(cls, model: Any, tokenizer: Any, name: str, weights_note: str = "") -> "BridgeLM":
        """Wrap a live transformers model, in place: the bridge replaces its submodules."""
        architecture = type(model).__name__
        model.eval()
        try:
            bridge = build_bridge_from_module(
                model, architecture, hf_config=model.config, tokenizer=tokenizer, model_name=name
            )
        except (ValueError, KeyError, NotImplementedError, AttributeError) as error:
            raise ModelError(f"{name}: TransformerBridge does not take {architecture}: {error}") from error
        return cls(bridge, name, weights_note)

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"BridgeLM({self.name}, {self.n_layers} layers, d_model {self.d_model}, {dtype}, {self.device})"

    def _hook_names(self) -> list[str]:
        return [hook_name(site, layer) for layer in range(self.n_layers) for site in "STC"] + [resid_pre_name(0)]

    @cached_property
    def layer_shapes(self) -> list[tuple[int, int, int]]:
        """(heads, key width, value width) of each layer's cache, from one short forward."""
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
        return [probe.layer_shapes[layer] for layer in range(self.n_layers)]

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        return KVCache(rows, capacity, self.layer_shapes, self.dtype, self.device)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        cache: KVCache,
        rows: Sequence[int],
        starts: Sequence[int],
        *,
        num_layers: int | None = None,
        logit_slots: Sequence[int] | None = None,
    ) -> Tensor:
        """See CachedLM.forward."""
        if num_layers == self.n_layers:  # the bridge would go on to the logits
            return self._last_residual(token_ids, cache, rows, starts)
        extra: dict[str, Any] = {}
        if num_layers is not None:
            extra["stop_at_layer"] = num_layers
        elif logit_slots is not None and self._can_choose_logits:
            extra["logits_to_keep"] = torch.tensor(list(logit_slots), device=self.device)
        with staged(cache, rows, starts, token_ids.shape[1], self.config, self.n_ctx) as inputs:
            out = self.bridge.forward(token_ids.to(self.device), return_type="logits", **inputs, **extra)
        if logit_slots is not None and num_layers is None and "logits_to_keep" not in extra:
            out = out[:, list(logit_slots)]
        return out

    def _last_residual(self, token_ids: Tensor, cache: KVCache, rows: Sequence[int], starts: Sequence[int]) -> Tensor:
        kept: list[Tensor] = []
        with self.capturing([("S", self.n_layers - 1)], lambda site, layer, value: kept.append(value.clone())):
            self.forward(token_ids, cache, rows, starts, logit_slots=[0])
        return kept[0]

    @property
    def config(self) -> Any:
        """The wrapped model's own config."""
        return self.bridge.original_model.config

    @cached_property
    def _can_choose_logits(self) -> bool:
        return "logits_to_keep" in inspect.signature(type(self.bridge.original_model).forward).parameters

    @contextmanager
    def capturing(self, sites: Sequence[tuple[str, int]], sink: StateSink) -> Iterator[None]:
        """See CachedLM.capturing. Only the hooks added here are removed."""

        def keep(site: str, layer: int, value: Tensor, hook: Any) -> None:
            sink(site, layer, value)

        hooks = [(hook_name(site, layer), partial(keep, site, layer)) for site, layer in sites]
        missing = [name for name, _ in hooks if name not in self.bridge.hook_dict]
        if missing:
            raise ModelError(f"{self.name} has no hook {missing[0]}")
        with self.bridge.hooks(fwd_hooks=hooks):
            yield

    @torch.inference_mode()
    def read_out(self, states: Tensor) -> Tensor:
        """See CachedLM.read_out. Softcaps and logit scales of the architecture are applied."""
        logits = self.bridge.unembed(self.bridge.ln_final(states[None]))
        return self.bridge.adapter.apply_output_logits_transform(logits)[0]

    def fingerprint(self) -> dict[str, str | int | float]:
        return {
            "model": self.name,
            "weights_sha256": self.weights_sha256,
            "architecture": type(self.bridge.original_model).__name__,
            "path": "bridge",
            "attention": "eager (TransformerBridge)",
            "compatibility_mode": bool(getattr(self.bridge, "compatibility_mode", False)),
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": str(self.device),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "transformer_lens": getattr(transformer_lens, "__version__", "unknown"),
            "threads": torch.get_num_threads(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "mkldnn": torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled,
            "mkl_cbwr": os.environ.get("MKL_CBWR", ""),
        }

    @property
    def weights_sha256(self) -> str:
        """Hash of every parameter's bytes, in the order of their names; taken anew after any of them was edited."""
        named = sorted(self.bridge.original_model.named_parameters(), key=lambda item: item[0])
        versions = tuple((weight.data_ptr(), 0 if weight.is_inference() else weight._version) for _, weight in named)
        if self._hashed is None or self._hashed[0] != versions:
            self._hashed = (versions, _sha256_of(named))
        return self._hashed[1]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        if self.tokenizer is None:
            raise ModelError(f"{self.name} has no tokenizer, so prompts must be lists of token ids, not text")
        return tuple(self.tokenizer(text, add_special_tokens=add_special_tokens).input_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        if self.tokenizer is None:
            return " ".join(self.token_texts(token_ids))
        return self.tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False)

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        if self.tokenizer is None:
            return [f"<{token_id}>" for token_id in token_ids]
        return [self.tokenizer.decode([t], clean_up_tokenization_spaces=False) for t in token_ids]

    def to_activation_cache(self, states: dict[tuple[str, int], Tensor]) -> ActivationCache:
        named = {hook_name(site, layer): value[None] for (site, layer), value in states.items()}
        for (site, layer), value in states.items():
            if site == "S" and layer + 1 < self.n_layers:  # what leaves a block enters the next
                named[resid_pre_name(layer + 1)] = value[None]
        return ActivationCache(named, self.bridge, has_batch_dim=True)


def _sha256_of(named: list[tuple[str, torch.nn.Parameter]]) -> str:
    digest = hashlib.sha256()
    for name, weight in named:
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        digest.update(memoryview(weight.detach().cpu().contiguous().view(torch.uint8).numpy()).cast("B"))
    return digest.hexdigest()[:16]


def _one_dtype(bridge: TransformerBridge, name: str) -> torch.dtype:
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in bridge.parameters()})
    if len(dtypes) != 1:
        raise ModelError(
            f"{name} holds weights of two dtypes, {' and '.join(dtypes)}; convert it to one with .to(dtype)"
        )
    if dtypes[0] not in ("float32", "bfloat16", "float16"):
        raise ModelError(f"{name} is in {dtypes[0]}; convert it to float32, bfloat16 or float16")
    return next(bridge.parameters()).dtype


def _stop_token_ids(bridge: TransformerBridge) -> tuple[int, ...]:
    """End-of-sequence ids by the model's generation config, its config or its tokenizer, whichever speaks first."""
    model = bridge.original_model
    for holder in (getattr(model, "generation_config", None), getattr(model, "config", None), bridge.tokenizer):
        eos = getattr(holder, "eos_token_id", None)
        if eos is not None:
            return tuple(sorted(eos)) if isinstance(eos, list | tuple) else (int(eos),)
    return ()
