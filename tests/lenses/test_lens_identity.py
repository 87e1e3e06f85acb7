"""A run is read on by the same lens alone: settings, numbers, functions and what functions hold make its text."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import cacheprobe as cp
from cacheprobe.lenses.base import Lens, lens_identity


def scaled(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda states: states * factor


class Scaling:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, states: Tensor) -> Tensor:
        return states * self.factor

    def apply(self, states: Tensor) -> Tensor:
        return states * self.factor


def times(states: Tensor, factor: Tensor) -> Tensor:
    return states * factor


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU())


def long_vector(middle: float) -> Tensor:
    """Its repr is shortened in the middle."""
    values = torch.ones(5000)
    values[2500] = middle
    return values


@pytest.mark.parametrize(
    "of",
    [
        scaled,
        Scaling,
        lambda x: Scaling(x).apply,
        lambda x: partial(times, factor=long_vector(x)),
        lambda x: network(int(x)),
        lambda x: torch.eye(32) * x,
        lambda x: lambda states, factor=x: states * factor,
    ],
    ids=["closure", "object", "method", "partial", "module", "matrix", "default"],
)
def test_maps_that_differ(of: Callable[[float], Callable[[Tensor], Tensor]]) -> None:
    one, same, other = (lens_identity(cp.lenses.Patchscope((1, 2, 3), linear_map=of(x))) for x in (1.0, 1.0, 5.0))
    assert one == same != other


@dataclass(frozen=True, eq=False)
class Hidden(Lens):
    name: ClassVar[str] = "hidden"
    weights: list[Tensor] = field(repr=False)

    def logits(self, model: object, states: Tensor, layers: Tensor) -> Tensor:
        return states


@dataclass(frozen=True, eq=False, slots=True)
class Slotted(Lens):
    name: ClassVar[str] = "slotted"
    weights: dict[str, Tensor]

    def logits(self, model: object, states: Tensor, layers: Tensor) -> Tensor:
        return states


@pytest.mark.parametrize("kind", [lambda x: Hidden([x]), lambda x: Slotted({"w": x})], ids=["hidden", "slots"])
def test_numbers_inside_of_fields(kind: Callable[[Tensor], Lens]) -> None:
    one, same, other = (lens_identity(kind(torch.full((3,), x))) for x in (1.0, 1.0, 2.0))
    assert one == same != other
    assert lens_identity(kind(torch.empty(0))) != one


def test_lenses_with_matrices_may_be_compared() -> None:
    assert cp.lenses.Patchscope((1, 2), linear_map=torch.eye(3)) != cp.lenses.Patchscope(
        (1, 2), linear_map=torch.eye(3)
    )
