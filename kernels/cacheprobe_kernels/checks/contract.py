"""The contract of every kernel, as complaints: none is a pass. Run in the interpreter by the tests, and on a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from cacheprobe.ops.equality import bitwise
from cacheprobe_kernels.base import Case, Draws, Kernel, Outcome, Variant

_POISON = -77
"""In integers that nobody wrote; elsewhere it is NaN, or True."""


@contextmanager
def poisoned() -> Iterator[None]:
    """New tensors are filled with NaN, -77 or True: what a kernel leaves unwritten shows."""
    real = torch.empty

    def filled(*args: Any, **kwargs: Any) -> Tensor:
        new = real(*args, **kwargs)
        if new.device.type == "meta":
            return new
        return new.fill_(torch.nan if new.is_floating_point() else True if new.dtype == torch.bool else _POISON)

    with mock.patch.object(torch, "empty", filled):
        yield


def reference_complaints(kernel: type[Kernel], case: Case, device: torch.device | str = "cpu") -> list[str]:
    """Returns where a kernel's outcome is not its reference's or the definition's, and what it leaves unwritten."""
    return kernel.complaints(case, torch.device(device), memory=poisoned)


def full_complaints(kernel: type[Kernel], device: torch.device, case: Case) -> list[str]:
    """At the sizes of a model: against the reference alone, and in another batch."""
    arguments = kernel.inputs(case, Draws(device))
    with poisoned():
        got = kernel.outcome(kernel.run, arguments)
    found = kernel.differences(case, "its reference", got, kernel.outcome(kernel.reference, arguments))
    said = [f"{kernel.label(case)}: {text}" for text in found]
    return said + batch_complaints(kernel, case, device)


def batch_complaints(kernel: type[Kernel], case: Case, device: torch.device | str = "cpu") -> list[str]:
    """Where bits depend on the batch: rows, order, padding, splits, stale content. Also on a second run."""
    arguments = kernel.inputs(case, Draws(torch.device(device)))
    with poisoned():
        whole = kernel.outcome(kernel.run, arguments)
        again = Variant("a second time", arguments, lambda outcome: outcome)
        found = [
            f"{kernel.label(case)}: {variant.name}: {name} has other bits"
            for variant in [again, *kernel.variants(arguments)]
            for name in _other_bits(kernel, variant, whole)
        ]
    return found


def _other_bits(kernel: type[Kernel], variant: Variant, whole: Outcome) -> Iterator[str]:
    wanted = variant.expected(whole)
    got = variant.picked(kernel.outcome(kernel.run, *(variant.calls or (variant.arguments,))))
    if not wanted:
        raise ValueError(f"{kernel.name}: {variant.name} compares nothing")
    yield from (name for name, value in wanted.items() if not bitwise(got[name], value))
