"""Models for the invariants: around a tiny one, a spy, a machine that rounds by shape, and ones that fail on demand."""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor

import cacheprobe as cp
from cacheprobe.engine import shape_trial
from cacheprobe.kvcache.cache import KVCache
from cacheprobe.kvcache.staged import PassAttention
from cacheprobe.models.base import CachedLM
from cacheprobe.models.paths import choose_path
from cacheprobe.models.plain.lm import PlainLM
from cacheprobe_benchmarks.shared.tiny import NEAR_TIES, tiny_model
from tests.compiled import on_loops
from tests.proxies import take_members
from tests.tiny import hf_model, loaded


@dataclass
class Call:
    """One forward pass, as the model saw it."""

    number: int
    token_ids: Tensor
    rows: list[int]
    starts: list[int]
    num_layers: int | None
    logit_slots: list[int] | None
    cache: KVCache
    attention: PassAttention | None = None
    out: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return (self.token_ids.shape[0], self.token_ids.shape[1])

    def fed(self, row: int) -> tuple[int, list[int]]:
        """(first position, token ids with pads) of a cache row."""
        b = self.rows.index(row)
        return self.starts[b], self.token_ids[b].tolist()


class Spy:
    """A CachedLM around another one that remembers every pass and every cache."""

    def __init__(self, inner: CachedLM) -> None:
        self.inner = inner
        take_members(self, inner)
        # what was tried on the model inside holds for this one, and no trial is among the calls
        shape_trial._known[self] = shape_trial._known.setdefault(inner, {})
        self.calls: list[Call] = []
        self.caches: list[KVCache] = []

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        self.caches.append(self.inner.new_cache(rows, capacity))
        return self.caches[-1]

    def forward(
        self,
        token_ids: Tensor,
        cache: KVCache,
        rows: Sequence[int],
        starts: Sequence[int],
        *,
        num_layers: int | None = None,
        logit_slots: Sequence[int] | None = None,
        attention: PassAttention | None = None,
    ) -> Tensor:
        slots = None if logit_slots is None else list(logit_slots)
        call = Call(len(self.calls), token_ids.clone(), list(rows), list(starts), num_layers, slots, cache, attention)
        self.calls.append(call)
        call.out = self.answer(call)
        return call.out

    def answer(self, call: Call) -> Tensor:
        """What the model says; subclasses meddle here."""
        return self.inner.forward(
            call.token_ids,
            call.cache,
            call.rows,
            call.starts,
            num_layers=call.num_layers,
            logit_slots=call.logit_slots,
            attention=call.attention,
        )


class Faulty(Spy):
    """Fails where `plan(call)` says so: by raising what it returns, or by NaN in the cache rows it returns.

    A pass that raises has already written its first layer's keys and values; NaN stands in logits, keys and values of
    all that was fed, as it would behind a NaN in the embedding.
    """

    def __init__(self, inner: CachedLM, plan: Callable[[Call], "BaseException | list[int] | None"]) -> None:
        super().__init__(inner)
        self.plan = plan
        self.num_faults = 0

    def answer(self, call: Call) -> Tensor:
        fault = self.plan(call)
        self.num_faults += fault is not None
        if isinstance(fault, BaseException):
            self.inner.forward(call.token_ids, call.cache, call.rows, call.starts, num_layers=1)
            raise fault
        out = super().answer(call).clone()
        for row in fault or ():
            b = call.rows.index(row)
            out[b] = torch.nan
            for held in (*call.cache.keys, *call.cache.values):
                held[row, :, call.starts[b] : call.starts[b] + call.shape[1]] = torch.nan
        return out


class Breach(BaseException):
    """What a look at a pass found wrong. No Exception: the engine would take it for a pass that failed."""


class Meddler(Spy):
    """Lets `meddle(call)` look at every pass, or change caches and logits after it."""

    def __init__(self, inner: CachedLM, meddle: Callable[[Call], None]) -> None:
        super().__init__(inner)
        self.meddle = meddle

    def answer(self, call: Call) -> Tensor:
        call.out = super().answer(call).clone()
        try:
            self.meddle(call)
        except AssertionError as error:
            raise Breach(str(error)) from error
        return call.out


class WithFault:
    """A model whose logits are others in passes of one height or width. Lists the shapes of all passes."""

    def __init__(self, inner: CachedLM, height: int | None = None, width: int | None = None) -> None:
        self.inner, self._fault = inner, (height, width)
        take_members(self, inner)
        self.shapes: list[tuple[int, int]] = []

    def forward(self, token_ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.shapes.append((token_ids.shape[0], token_ids.shape[1]))
        out = self.inner.forward(token_ids, *args, **kwargs)
        return out * (1 + 2**-20) if any(a == b for a, b in zip(self._fault, token_ids.shape, strict=True)) else out


def in_loops(dtype: torch.dtype = torch.float32, family: str = "llama") -> PlainLM:
    """A model of which nothing was tried, whose operations run in the compiled loops."""
    fast = choose_path(on_loops(cp.load_model(hf_model(family, dtype))), "plain")[0]
    assert isinstance(fast, PlainLM)
    return fast


def plant(of: PlainLM, least_width: int) -> dict[str, bool]:
    """Plants a fault, and returns its switch: in passes of two or more requests and this width, products are one unit
    in the last place larger in all requests behind the first."""
    switch, operations = {"on": False}, of._by_module
    of.tapes = None  # a tape does not call `product` again
    own = operations.product

    def product(values: Tensor, *affine: Any) -> Tensor:
        out = own(values, *affine)
        if len(values) > 1 and values.shape[1] >= least_width and switch["on"]:
            out[1:] = out[1:].nextafter(torch.full_like(out[1:], torch.inf))
        return out

    operations.product = product  # ty: ignore
    return switch


def tiny(dtype: torch.dtype = torch.float32, path: str = "plain") -> CachedLM:
    """The three-layer llama in the form that a run would take, or on the bridge."""
    return choose_path(loaded("llama", dtype), path)[0]


@cache
def rounding_by_shape(strength: float = 0.05) -> PlainLM:
    """A machine on which every shape of a pass rounds differently, and so coarsely that tokens show it.

    What enters attention is off by a vector that depends on rows, token slots and attended slots of the pass, and on
    nothing else: the worst that a library's choice of kernels may do, at a size where every breach is visible. Logits
    differ by the last bits alone, since the capture compares them with a product of its own.
    """
    fast = choose_path(cp.load_model(hf_model()), "plain")[0]
    assert isinstance(fast, PlainLM)
    errors: dict[str, Tensor] = {}
    numbers: dict[tuple[int, ...], int] = {}

    def round_off(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        hidden, mask = kwargs["hidden_states"], kwargs["attention_mask"]
        key = f"{tuple(hidden.shape[:2])} {mask.shape[-1]}"
        if key not in errors:
            generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
            errors[key] = strength * torch.randn(hidden.shape[-1], generator=generator)
        return args, {**kwargs, "hidden_states": hidden + errors[key]}

    def round_logits(module: Any, args: Any, out: Tensor) -> Tensor:
        return out * (1 + numbers.setdefault(tuple(out.shape), len(numbers)) % 32 * 2**-22)

    for layer in fast.model.model.layers:
        layer.self_attn.register_forward_pre_hook(round_off, with_kwargs=True)
    fast.model.lm_head.register_forward_hook(round_logits)
    return fast


@cache
def near_twins() -> CachedLM:
    """A model in float32 whose tokens come in pairs that all but tie: other sums for other batches show in tokens."""
    return choose_path(cp.load_model(tiny_model("llama", torch.float32, size=NEAR_TIES)), "plain")[0]


@cache
def wide_bfloat16() -> CachedLM:
    """A model wide enough that real kernels, in bfloat16, choose other sums for other batches, and tokens differ."""
    shape = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4)
    specials = dict(eos_token_id=None, bos_token_id=None, pad_token_id=None)
    config = transformers.LlamaConfig(
        vocab_size=499, num_key_value_heads=2, initializer_range=0.05, max_position_embeddings=512, **shape, **specials
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    model.generation_config.eos_token_id = None
    return choose_path(cp.load_model(model.to(torch.bfloat16).eval()), "plain")[0]
