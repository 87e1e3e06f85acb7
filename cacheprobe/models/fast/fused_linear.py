"""Fuses linear layers that share an input: for few rows, the call costs about as much time as the arithmetic."""

import ctypes
import sys
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor, nn

from cacheprobe.core.live import LiveModule
from cacheprobe.ops.equality import bitwise

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
_Part = tuple[Tensor, Tensor | None]
Tried = dict[Hashable, dict[tuple[int, int], bool]]
"""Keyed by shapes, then (number of rows, number of threads): whether the fused product has the bits of the separate
ones."""

FEW_ROWS = 32
"""From this many rows on, the cost of a call no longer matters, and each layer's product is computed separately."""


class FusedLinear:
    """Computes several linear layers that share an input in one product.

    Their weights are stored one after another in one tensor, and the layers' own parameters become views of that
    tensor: no weight is stored twice. Few rows are computed in one product if its bits equal each layer's own product.
    This is tested at the first use of every number of rows, because libraries choose a kernel by shape and number of
    threads, not by values.
    Twin: each layer's product by itself, bitwise.
    """

    def __init__(self, layers: Sequence[nn.Module], product: Product, tried: Tried) -> None:
        """tried: earlier test results for layers of these shapes; updated in place."""
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
        """Whether no parameter was replaced (`weight.data = ...`) since construction. Checked in every forward."""
        return self.weight is None or all(part.data_ptr() == place for part, place in self._held)

    def __call__(self, values: Tensor) -> Sequence[Tensor]:
        """Returns one output [..., o] for each layer, from values [..., i]; views of one tensor if computed in one
        product."""
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
    """Returns values [1, rows, i] and weights whose every sum is zero, so that the computed output consists of rounding
    errors only.

    Two summation orders then give different outputs; with ordinary numbers they would nearly always round to the same
    16 bits.
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


def _numbers_of(layer: LiveModule) -> _Part:
    return layer.weight, layer.bias


def _tensors(parts: Sequence[_Part]) -> list[Tensor]:
    return [part for both in parts for part in both if part is not None]


def _can_move(layers: Sequence[nn.Module], parts: Sequence[_Part]) -> bool:
    """Returns whether the layers' weights can be moved into one tensor.

    Requires plain nn.Linear layers of one dtype and device whose storage is shared with no other process, layer or
    tensor, except a fused tensor from this file.
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
    """Returns one tensor with the rows of all given tensors; makes each given tensor a view of the new one if it is not
    yet."""
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
    """Returns whether the tensors fill one storage, one after another, with no other content."""
    ends = [part.data_ptr() + part.nbytes for part in tensors]
    storages = {part.untyped_storage().data_ptr() for part in tensors}
    is_full = tensors[0].untyped_storage().nbytes() == sum(part.nbytes for part in tensors)
    return len(storages) == 1 and is_full and [part.data_ptr() for part in tensors[1:]] == ends[:-1]


def _give_back() -> None:
    """Returns freed memory to the system. glibc would keep the memory of moved weights; trimming after each group
    limits the total."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)
