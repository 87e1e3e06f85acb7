"""Products of one input as one product: with few rows, a call costs about as much as what it computes."""

import ctypes
import sys
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cacheprobe.ops.equality import bitwise

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
_Part = tuple[Tensor, Tensor | None]
Tried = dict[Hashable, dict[tuple[int, int], bool]]
"""By shapes, then number of rows and of threads: whether one product has the bits of several."""

FEW_ROWS = 32
"""From so many on calls no longer count, and the parts are made one by one."""


class FusedLinear:
    """Linear layers of one input.

    Their weights lie behind each other in one tensor, of which the layers' own parameters are parts: nothing is held
    twice. Few rows are computed as one where that has each layer's bits, tried for every number of rows at its first
    use: libraries choose a kernel by the shape of a product and the number of threads, not by its numbers.
    Twin: each layer's product by itself, bitwise.
    """

    def __init__(self, layers: Sequence[nn.Module], product: Product, tried: Tried) -> None:
        """tried: what was found for layers of these shapes before; written to."""
        self.product = product
        self.parts: list[_Part] = [_numbers_of(layer) for layer in layers]
        self.sizes = [len(weight) for weight, _ in self.parts]
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        if _can_move(layers, self.parts):
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
        key = rows, torch.get_num_threads()
        if key not in self._tried:
            assert self.weight is not None
            values, weight = _cancelling(rows, self.weight)
            bias = None if self.bias is None else torch.zeros_like(self.bias)
            biases = [None] * len(self.sizes) if bias is None else bias.split(self.sizes)
            parts = zip(weight.split(self.sizes), biases, strict=True)
            apart = torch.cat([self.product(values, *part) for part in parts], -1)
            self._tried[key] = bitwise(self.product(values, weight, bias), apart)
        return self._tried[key]


def _cancelling(rows: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Values [1, rows, i] and weights of which every sum is zero, so that what comes out is nothing but roundings.

    Two orders of a sum differ in it; of other numbers they are the same 16 bits nearly always.
    """
    width, generator = like.shape[1], torch.Generator().manual_seed(rows)
    half = width // 2
    order = torch.randperm(half, generator=generator)
    values = torch.zeros(1, rows, width)
    weight = torch.zeros(like.shape)
    values[..., :half] = torch.randn(1, rows, half, generator=generator)
    weight[:, :half] = torch.randn(len(weight), half, generator=generator)
    values, weight = values.to(like), weight.to(like)
    values[..., half : 2 * half], weight[:, half : 2 * half] = values[..., order], -weight[:, order]
    return values, weight


def _numbers_of(layer: Any) -> _Part:
    return layer.weight, layer.bias


def _tensors(parts: Sequence[_Part]) -> list[Tensor]:
    return [part for both in parts for part in both if part is not None]


def _can_move(layers: Sequence[nn.Module], parts: Sequence[_Part]) -> bool:
    """Plain layers alike in type and place, whose numbers nobody else has.

    No other process, no second layer, no tensor of which they are parts, unless it is one that was made here.
    """
    tensors = _tensors(parts)
    if len({id(part) for part in tensors}) < len(tensors) or not all(
        _is_alone(own) or _are_behind_each_other(own) for own in _by_kind(parts) if own
    ):
        return False
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
    if _are_behind_each_other(tensors):
        first = tensors[0].detach()
        return first.as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride())
    with torch.inference_mode(False), torch.no_grad():
        whole = torch.cat([part.detach() for part in tensors])
        for part, place in zip(tensors, whole.split([len(part) for part in tensors]), strict=True):
            part.data = place
    if whole.device.type == "cpu":
        _give_back()
    return whole


def _is_alone(tensors: Sequence[Tensor]) -> bool:
    return all(part.untyped_storage().nbytes() == part.nbytes for part in tensors)


def _are_behind_each_other(tensors: Sequence[Tensor]) -> bool:
    """In one storage, which holds nothing else."""
    ends = [part.data_ptr() + part.nbytes for part in tensors]
    storages = {part.untyped_storage().data_ptr() for part in tensors}
    is_full = tensors[0].untyped_storage().nbytes() == sum(part.nbytes for part in tensors)
    return len(storages) == 1 and is_full and [part.data_ptr() for part in tensors[1:]] == ends[:-1]


def _give_back() -> None:
    """glibc keeps what moved weights leave behind; given back group by group, it does not add up."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)
