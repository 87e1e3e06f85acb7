"""Stands for a CUDA graph: work that is recorded while it is captured, and computed anew at each launch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.device.counts import Gpu

Computed = Callable[[], Any]
"""Computes an operation on CPU tensors, and returns its results."""


class CudaGraph(torch.cuda.CUDAGraph):
    """Holds the operations of a capture, and the memory of their results, which hold NaN until the first launch."""

    def __new__(cls, gpu: Gpu) -> "CudaGraph":
        return object.__new__(cls)

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._steps: list[tuple[Computed, Any]] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        """Address -> (bytes that were there before the capture, a copy)."""
        self._made: dict[int, Tensor] = {}
        """Address -> a result of an operation."""

    def __deepcopy__(self, memo: dict[int, object]) -> "CudaGraph":
        raise TypeError("cannot pickle 'CUDAGraph' object")

    def pool(self) -> tuple[int, int]:
        return (0, id(self))

    def record(self, compute: Computed, given: Sequence[Tensor]) -> Any:
        """Computes an operation for the shapes of its results. given: what it reads and writes."""
        for one in given:
            if one.untyped_storage().data_ptr() not in {**self._made, **self._before}:
                whole = torch.empty(0, dtype=torch.uint8).set_(one.untyped_storage())
                self._before[whole.data_ptr()] = whole, whole.clone()
        result = compute()
        for one in _tensors(result):
            if one.untyped_storage().data_ptr() not in self._before:
                self._made.setdefault(one.untyped_storage().data_ptr(), one)
        self._steps.append((compute, result))
        return result

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Records what is launched inside the `with`, and leaves memory as if nothing had been computed."""
        assert self._gpu.graph is None and not self._steps
        self._gpu.graph = self
        try:
            yield
        finally:
            self._gpu.graph = None
            for whole, kept in self._before.values():
                whole.copy_(kept)
            for one in self._made.values():
                one.fill_(
                    torch.nan
                    if one.is_floating_point()
                    else torch.iinfo(one.dtype).max
                    if one.dtype != torch.bool
                    else True
                )
            self._before.clear()

    @torch.inference_mode()
    def replay(self) -> None:
        """Computes all operations anew, into the memory of their first results; one launch."""
        self._gpu.launched("graph")
        for compute, result in self._steps:
            for kept, new in zip(_tensors(result), _tensors(compute()), strict=True):
                if kept.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    kept.copy_(new)


def _tensors(value: Any) -> list[Tensor]:
    return [one for one in tree_leaves(value) if isinstance(one, Tensor)]
