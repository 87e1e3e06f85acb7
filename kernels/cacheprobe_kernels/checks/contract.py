"""The contract of every kernel, as complaints: none is a pass. Run in the interpreter by the tests, and on a GPU."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from cacheprobe.ops.equality import bitwise, close
from cacheprobe_kernels.base import Arguments, Case, Draws, Kernel, Outcome, Variant

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


def outcome(kernel: type[Kernel], call: Callable[..., Any], *calls: Arguments) -> Outcome:
    """All that some calls on the same tensors return or change in the end; the arguments stay as they are."""
    shared = {name: calls[0][name].clone() for name in kernel.writes}
    returned = None
    for arguments in calls:
        returned = call(**{**arguments, **shared})
    return {**named(returned), **shared}


def named(returned: Any) -> Outcome:
    """A tensor is called "out", a NamedTuple's tensors by their fields."""
    if isinstance(returned, Tensor):
        return {"out": returned}
    return {} if returned is None else {name: value for name, value in returned._asdict().items() if value is not None}


def reference_complaints(
    kernel: type[Kernel], case: Case, device: torch.device | str = "cpu", memory: Callable[[], Any] = poisoned
) -> list[str]:
    """Where a kernel's outcome is not its reference's or the definition's, and what it leaves unwritten."""
    device = torch.device(device)
    arguments = kernel.inputs(case, Draws(device))
    with memory():
        got = outcome(kernel, kernel.run, arguments)
    by_reference = outcome(kernel, kernel.reference, arguments)
    found = list(_differences(kernel, case, "its reference", got, by_reference))
    exact = kernel.exact(**arguments)
    found += _differences(kernel, case, "the definition in float64", {name: got[name] for name in exact}, exact)
    return [f"{kernel.name} {case.name} {_short(case.dtype)}: {text}" for text in found]


def full_complaints(kernel: type[Kernel], device: torch.device) -> list[str]:
    """At the sizes of a model: against the reference alone, and in another batch."""
    arguments = kernel.inputs(kernel.full, Draws(device))
    with poisoned():
        got = outcome(kernel, kernel.run, arguments)
    found = _differences(kernel, kernel.full, "its reference", got, outcome(kernel, kernel.reference, arguments))
    said = [f"{kernel.name} {kernel.full.name} {_short(kernel.full.dtype)}: {text}" for text in found]
    return said + batch_complaints(kernel, kernel.full, device)


def batch_complaints(kernel: type[Kernel], case: Case, device: torch.device | str = "cpu") -> list[str]:
    """Where bits depend on the batch: rows, order, padding, splits, stale content. Also on a second run."""
    arguments = kernel.inputs(case, Draws(torch.device(device)))
    with poisoned():
        whole = outcome(kernel, kernel.run, arguments)
        again = Variant("a second time", arguments, lambda outcome: outcome)
        found = [
            f"{kernel.name} {case.name} {_short(case.dtype)}: {variant.name}: {name} has other bits"
            for variant in [again, *kernel.variants(arguments)]
            for name in _other_bits(kernel, variant, whole)
        ]
    return found


def _other_bits(kernel: type[Kernel], variant: Variant, whole: Outcome) -> Iterator[str]:
    wanted = variant.expected(whole)
    got = variant.picked(outcome(kernel, kernel.run, *(variant.calls or (variant.arguments,))))
    if not wanted:
        raise ValueError(f"{kernel.name}: {variant.name} compares nothing")
    yield from (name for name, value in wanted.items() if not bitwise(got[name], value))


def _differences(
    kernel: type[Kernel], case: Case, what: str, got: Outcome, wanted: Mapping[str, Tensor]
) -> Iterator[str]:
    if set(got) != set(wanted):
        yield f"has {sorted(got)} where {what} has {sorted(wanted)}"
        return
    for name, value in wanted.items():
        rtol = kernel.rtol(name, case)
        if rtol is None:
            continue
        mine = got[name]
        if rtol == 0.0 and value.dtype == mine.dtype:
            if not bitwise(_one_nan(mine), _one_nan(value)):
                yield f"{name} has other bits than {what}: {_first(mine, value)}"
        elif mine.shape != value.shape:
            yield f"{name} is {tuple(mine.shape)} where {what} is {tuple(value.shape)}"
        elif not torch.equal(mine.isnan(), value.isnan()):
            yield f"{name} is NaN where {what} is not, or the other way round: {_first(mine, value)}"
        elif not close(mine.nan_to_num(), value.nan_to_num(), rtol or _rounding(mine.dtype), because=kernel.because):
            yield f"{name} is not {what} within {rtol or _rounding(mine.dtype):.1e}: {_first(mine, value)}"


def _one_nan(values: Tensor) -> Tensor:
    """Which of the many NaNs a conversion makes is the device's own affair."""
    return values.masked_fill(values.isnan(), torch.nan) if values.is_floating_point() else values


def _rounding(dtype: torch.dtype) -> float:
    """Of one number from float64."""
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def _first(mine: Tensor, value: Tensor) -> str:
    if mine.shape != value.shape:
        return f"{tuple(mine.shape)} and {tuple(value.shape)}"
    distance = (mine.double() - value.double()).abs().nan_to_num(nan=torch.inf)
    place = tuple(int(i) for i in torch.unravel_index(distance.argmax(), distance.shape)) if distance.ndim else ()
    return f"at {place} {mine[place].item()} and {value[place].item()}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
