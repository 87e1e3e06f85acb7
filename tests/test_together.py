"""Layers of one input whose product is made as one: the same bits, and nothing held twice."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from cacheprobe.models.fast.fused_linear import FEW_ROWS, FusedLinear, Tried
from cacheprobe.models.fast.hooked_hf import HookedHF
from cacheprobe.ops.equality import bitwise
from tests.feeding import texts
from tests.tiny import loaded

pytestmark = pytest.mark.determinism

SIZES = (24, 8, 8)


def layers(bias: bool = False, dtype: torch.dtype = torch.bfloat16) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(24, size, bias=bias, dtype=dtype) for size in SIZES]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_one_product_has_the_bits_of_each(bias: bool, dtype: torch.dtype) -> None:
    apart = layers(bias, dtype)
    expected = {rows: [layer(values(rows, dtype)) for layer in apart] for rows in (1, 2, 7, FEW_ROWS - 1, FEW_ROWS)}
    together = FusedLinear(apart, linear, {})
    assert together.weight is not None
    for rows, wanted in expected.items():
        made = together(values(rows, dtype))
        assert [part.shape[-1] for part in made] == list(SIZES)
        assert all(bitwise(part.contiguous(), one) for part, one in zip(made, wanted, strict=True)), rows


def values(rows: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(1, rows, 24, generator=torch.Generator().manual_seed(rows)).to(dtype)


def test_few_rows_take_one_call_and_many_one_for_each_part() -> None:
    calls: list[int] = []

    def counted(of: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        calls.append(len(weight))
        return (of[..., None, :] * weight).sum(-1)  # the same bits at any width, which a library need not have

    together = FusedLinear(layers(), counted, {})
    together(values(FEW_ROWS - 1, torch.bfloat16))
    assert sorted(calls) == sorted([*SIZES, sum(SIZES), sum(SIZES)]), "tried, and made"
    calls.clear()
    together(values(FEW_ROWS - 1, torch.bfloat16))
    together(values(FEW_ROWS, torch.bfloat16))
    assert calls == [sum(SIZES), *SIZES]


def test_parameters_stay_the_layers_own_and_lie_in_one_tensor() -> None:
    made = layers(bias=True)
    parameters, before = [layer.weight for layer in made], [layer.weight.clone() for layer in made]
    together = FusedLinear(made, linear, {})
    assert together.weight is not None
    assert [layer.weight for layer in made] == parameters, "the very same objects, which an optimiser may hold"
    assert all(bitwise(layer.weight.detach(), one.detach()) for layer, one in zip(made, before, strict=True))
    assert {layer.weight.untyped_storage().data_ptr() for layer in made} == {together.weight.data_ptr()}
    again = FusedLinear(made, linear, {})
    assert again.weight is not None and again.weight.data_ptr() == together.weight.data_ptr()
    with torch.no_grad():
        made[1].weight.mul_(2)
    few = values(3, torch.bfloat16)
    assert bitwise(together(few)[1].contiguous(), made[1](few))


def test_rows_whose_bits_follow_the_width_are_not_made_as_one() -> None:
    """Tried with each number of rows, once for all layers of these shapes."""
    tried: Tried = {}
    calls: list[int] = []

    def by_width(of: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        calls.append(len(weight))
        out = (of[..., None, :] * weight).sum(-1)  # each output by itself; the small products of a library are not
        return out + 1 if len(weight) == sum(SIZES) and of.shape[-2] == 7 else out

    one, other = (FusedLinear(layers(), by_width, tried) for _ in range(2))
    as_one, apart, trial = [sum(SIZES)], list(SIZES), [*SIZES, sum(SIZES)]
    for together, expected_calls in ((one, [*trial, *as_one, *trial, *apart]), (other, [*as_one, *apart])):
        calls.clear()
        made = {rows: together(values(rows, torch.bfloat16)) for rows in (6, 7)}
        assert calls == expected_calls
        for rows, parts in made.items():
            expected = [by_width(values(rows, torch.bfloat16), *part) for part in together.parts]
            assert all(bitwise(part.contiguous(), wanted) for part, wanted in zip(parts, expected, strict=True))


@pytest.mark.parametrize(
    "why",
    [
        "shared with a process",
        "of two types",
        "one has a bias",
        "a layer of its own kind",
        "a part",
        "one of two names",
    ],
)
def test_what_may_not_be_moved_is_left_alone(why: str) -> None:
    made = layers()
    if why == "shared with a process":
        made[1].weight.share_memory_()
    elif why == "of two types":
        made[1].float()
    elif why == "one has a bias":
        made[1].bias = nn.Parameter(torch.zeros(8, dtype=torch.bfloat16))
    elif why == "a part":
        made[1].weight.data = torch.cat([made[1].weight.detach()] * 2)[:8]
    elif why == "one of two names":
        made[2].weight = made[1].weight
    else:
        made[1].__class__ = type("Quantised", (nn.Linear,), {})
    before = [layer.weight.data_ptr() for layer in made]
    assert FusedLinear(made, linear, {}).weight is None
    assert [layer.weight.data_ptr() for layer in made] == before


def test_a_forward_sees_other_numbers() -> None:
    """`weight.data = ...` leaves the parameter and moves its numbers."""
    lean = HookedHF(loaded.__wrapped__("llama"))
    ids = texts(5)[0][None]

    def logits() -> Tensor:
        return lean.forward(ids, lean.new_cache(1, 16), [0], [0])

    before, first = logits(), lean._lean
    assert bitwise(logits(), before) and lean._lean is first
    projection = lean.model.model.layers[1].self_attn.k_proj
    held = projection.weight.data
    projection.weight.data = held * 2
    assert not bitwise(logits(), before)
    projection.weight.data = held
    assert bitwise(logits(), before)


def test_other_threads_are_another_trial() -> None:
    tried: Tried = {}
    together = FusedLinear(layers(), linear, tried)
    here = torch.get_num_threads()
    try:
        for threads in (here, here + 1, here):
            torch.set_num_threads(threads)
            together(values(3, torch.bfloat16))
    finally:
        torch.set_num_threads(here)
    assert [list(rows) for rows in tried.values()] == [[(3, here), (3, here + 1)]]


def test_a_trial_tells_two_orders_of_a_sum_apart_where_drawn_numbers_do_not() -> None:
    """Rounded to 16 bits, most sums of drawn numbers are the same in any order."""

    def backwards(of: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        of, weight = of.double(), weight.double()
        steps = range(weight.shape[1]) if len(weight) == sum(SIZES) else reversed(range(weight.shape[1]))
        total = torch.zeros(*of.shape[:-1], len(weight))
        for i in steps:
            total += (of[..., i : i + 1] * weight[:, i]).float()
        return total.bfloat16()

    made = layers()
    drawn = values(1, torch.bfloat16)
    in_one_sum = (drawn.double() @ made[0].weight.double().T).bfloat16()
    assert bitwise(backwards(drawn, made[0].weight, None), in_one_sum), "the control: they look alike"
    tried: Tried = {}
    FusedLinear(made, backwards, tried)(drawn)
    assert [list(rows.values()) for rows in tried.values()] == [[False]]
