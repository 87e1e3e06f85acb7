"""Experts and routers computed batch-invariantly: bits against other companies, values against the classes' own."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cacheprobe as cp
from cacheprobe.models.experts import PRODUCT, forward_of, rows_alone, use_invariant_experts
from cacheprobe.ops.compiled.lanes import FLOATS
from cacheprobe.ops.compiled.operations import CompiledProduct, choose
from cacheprobe.ops.equality import bitwise, close
from tests.experts.families import plain

pytestmark = pytest.mark.determinism

WIDE: dict[str, Any] = dict(hidden_size=256, intermediate_size=200, moe_intermediate_size=200, num_hidden_layers=2)
"""An inner width that is no multiple of the processor's registers."""
FAMILIES = pytest.mark.parametrize("family", ["mixtral", "gpt-oss", "deepseek-v3"])


@cache
def mixture(family: str, dtype: torch.dtype, is_compiled: bool) -> Any:
    """The mixture of layer 1. Compiled: with the loops chosen here, or with those of float32 where torch is chosen."""
    operations = choose(dtype, torch.device("cpu")).operations
    compiled = CompiledProduct(FLOATS) if operations is None else operations.product
    return use_invariant_experts(plain(family, dtype, **WIDE), compiled if is_compiled else None)[1]


def tokens(dtype: torch.dtype, count: int = 48) -> Tensor:
    return torch.randn(count, 256, generator=torch.Generator().manual_seed(1)).to(dtype)


def companies(count: int) -> list[list[int]]:
    """Every second token, the last ones, two of them, one alone: each leaves other tokens to the experts."""
    return [list(range(0, count, 2)), list(range(count - 13, count)), [5, 40], [17]]


@torch.inference_mode()
def routed(one: Any, states: Tensor) -> Tensor:
    _, weights, experts = one.router(states)
    return one.experts(states, experts, weights)


@pytest.mark.parametrize(
    ("family", "dtype", "is_compiled"),
    [
        ("mixtral", torch.float32, True),
        ("gpt-oss", torch.bfloat16, False),
        ("deepseek-v3", torch.bfloat16, True),
    ],
)
def test_a_token_has_the_same_bits_beside_any_others(family: str, dtype: torch.dtype, is_compiled: bool) -> None:
    one, states = mixture(family, dtype, is_compiled), tokens(dtype)
    whole = routed(one, states)
    assert len(one.router(states)[2].unique()) > 3
    for chosen in companies(len(states)):
        assert bitwise(routed(one, states[chosen]), whole[chosen]), chosen


@FAMILIES
def test_values_are_those_of_the_class(family: str) -> None:
    one, states = mixture(family, torch.float32, False), tokens(torch.float32)
    ours, ids = routed(one, states), one.router(states)[2]
    experts, router = one.experts, one.router
    kept = vars(router).pop("forward")
    try:
        experts.config._experts_implementation = "eager"
        assert torch.equal(one.router(states)[2], ids)
        assert close(ours, routed(one, states), 1e-5, because="products of single rows, sums in another order")
    finally:
        vars(router)["forward"], experts.config._experts_implementation = kept, "cacheprobe"


def test_the_order_of_a_tokens_experts_says_nothing() -> None:
    """topk may list a token's experts in any order (`sorted=False` in DeepSeek's routers)."""
    one, states = mixture("deepseek-v3", torch.bfloat16, False), tokens(torch.bfloat16)
    with torch.inference_mode():
        _, weights, ids = one.router(states)
        order = torch.tensor([2, 0, 1])
        assert bitwise(one.experts(states, ids, weights), one.experts(states, ids[:, order], weights[:, order]))


def test_each_module_keeps_its_product() -> None:
    live = plain("olmoe")
    model: Any = cp.load_model(live, products="torch")
    for one in model.mixtures.values():
        assert vars(one.experts)[PRODUCT] is rows_alone
        forward = forward_of(one.router)
        assert forward is not None and forward.product is rows_alone
    assert isinstance(model.mixtures[0].experts, nn.Module) and list(model.mixtures) == [0, 1, 2]
