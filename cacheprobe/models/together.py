"""Products of one input as one product: with few rows, a call costs about as much as what it computes."""

import ctypes
import sys
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
_Part = tuple[Tensor, Tensor | None]
Tried = dict[Hashable, dict[int, bool]]
"""By shapes and number of rows: whether one product has the bits of several."""

FEW_ROWS = 32
"""From so many on calls no longer count, and the parts are made one by one."""
LANES = 64
"""Numbers that an elementwise operation of 16-bit types takes at once. A row of a part that is no whole multiple has a
remainder, which may be computed otherwise than where the part is a tensor of its own."""


class Together:
    """Linear layers of one input.

    Their weights lie behind each other in one tensor, of which the layers' own parameters are parts: nothing is held
    twice. Few rows are computed as one where that has each layer's bits, tried for every number of rows at its first
    use: libraries choose a kernel by the shape of a product and the number of threads, not by its numbers.
    Twin: each layer's product by itself, bitwise.
    """

    def __init__(self, layers: Sequence[nn.Module], product: Product, tried: Tried, multiple_of: int = 1) -> None:
        """tried: what was found for layers of these shapes before; written to, and of one number of threads.

        multiple_of: what the widths of parts have to be multiples of, for the sake of what is computed with them.
        """
        self.product = product
        self.parts: list[_Part] = [_numbers_of(layer) for layer in layers]
        self.sizes = [len(weight) for weight, _ in self.parts]
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        if _can_move(layers, self.parts) and not any(size % multiple_of for size in self.sizes):
            self.weight, self.bias = _behind_each_other(self.parts)
        kind = tuple((part.shape, part.dtype, part.device) for part in _tensors(self.parts))
        self._tried = tried.setdefault(kind, {})
        self._held = [(part, part.data_ptr()) for part in _tensors(self.parts)]

    @property
    def is_current(self) -> bool:
        """Whether no parameter was given other numbers elsewhere (`weight.data = ...`). Asked in every forward."""
        return self.weight is None or all(part.data_ptr() == place for part, place in self._held)

    def __call__(self, values: Tensor) -> Sequence[Tensor]:
        """[... i] -> [... o] of each layer; where they were made as one, parts of one tensor."""
        rows = values.numel() // values.shape[-1]
        if self.weight is None or rows >= FEW_ROWS or not self._has_same_bits(rows):
            return [self.product(values, *part) for part in self.parts]
        return self.product(values, self.weight, self.bias).split(self.sizes, -1)

    def _has_same_bits(self, rows: int) -> bool:
        if rows not in self._tried:
            assert self.weight is not None
            drawn = torch.randn(rows, self.weight.shape[1], generator=torch.Generator().manual_seed(rows))
            values = drawn.to(self.weight)
            apart = torch.cat([self.product(values, *part) for part in self.parts], -1)
            self._tried[rows] = torch.equal(self.product(values, self.weight, self.bias), apart)
        return self._tried[rows]


def _numbers_of(layer: Any) -> _Part:
    return layer.weight, layer.bias


def _tensors(parts: Sequence[_Part]) -> list[Tensor]:
    return [part for both in parts for part in both if part is not None]


def _can_move(layers: Sequence[nn.Module], parts: Sequence[_Part]) -> bool:
    """Plain layers alike in type and place, whose weights no other process shares."""
    tensors = _tensors(parts)
    are_alike = len({(part.dtype, part.device) for part in tensors}) == len({bias is None for _, bias in parts}) == 1
    are_plain = all(type(layer) is nn.Linear for layer in layers) and all(part.is_contiguous() for part in tensors)
    return (
        are_alike and are_plain and not any(part.is_meta or part.is_inference() or part.is_shared() for part in tensors)
    )


def _behind_each_other(parts: Sequence[_Part]) -> _Part:
    weight, bias = (None if tensors is None else _joined(tensors) for tensors in _by_kind(parts))
    assert weight is not None
    return weight, bias


def _by_kind(parts: Sequence[_Part]) -> tuple[list[Tensor], list[Tensor] | None]:
    biases = [bias for _, bias in parts if bias is not None]
    return [weight for weight, _ in parts], biases or None


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """One tensor of all rows, of which the given ones become parts where they are not yet."""
    ends = [part.data_ptr() + part.nbytes for part in tensors]
    is_one_storage = len({part.untyped_storage().data_ptr() for part in tensors}) == 1
    if is_one_storage and [part.data_ptr() for part in tensors[1:]] == ends[:-1]:
        first = tensors[0].detach()
        return first.as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride())
    with torch.inference_mode(False), torch.no_grad():
        whole = torch.cat([part.detach() for part in tensors])
        for part, place in zip(tensors, whole.split([len(part) for part in tensors]), strict=True):
            part.data = place
    _give_back()
    return whole


def _give_back() -> None:
    """glibc keeps what moved weights leave behind; the system may have it."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)
