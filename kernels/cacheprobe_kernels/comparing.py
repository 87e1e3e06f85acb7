"""Compares the tensors that a kernel returned or changed with those of its reference, as complaints."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from cacheprobe.ops.equality import bitwise, close


def named(returned: Any) -> dict[str, Tensor]:
    """Returns the tensors of a call by name: a single tensor is "out", those of a NamedTuple have its fields."""
    if isinstance(returned, Tensor):
        return {"out": returned}
    return {} if returned is None else {name: value for name, value in returned._asdict().items() if value is not None}


def differences(
    what: str,
    got: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor],
    rtol_of: Callable[[str], float | None],
    because: str,
) -> Iterator[str]:
    """Yields a complaint for every tensor of `got` that is not the one of `wanted`, which comes from `what`.

    rtol_of: by name of a tensor the tolerance: 0 for equal bits, None if it is not compared.  because: the reason for
    a tolerance.
    """
    if set(got) != set(wanted):
        yield f"has {sorted(got)} where {what} has {sorted(wanted)}"
        return
    for name, value in wanted.items():
        rtol = rtol_of(name)
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
        elif not close(mine.nan_to_num(), value.nan_to_num(), rtol or _rounding(mine.dtype), because=because):
            yield f"{name} is not {what} within {rtol or _rounding(mine.dtype):.1e}: {_first(mine, value)}"


def _one_nan(values: Tensor) -> Tensor:
    """Replaces every NaN by the same one: which of the many a conversion makes depends on the device."""
    return values.masked_fill(values.isnan(), torch.nan) if values.is_floating_point() else values


def _rounding(dtype: torch.dtype) -> float:
    """Returns the relative error of rounding one float64 number to this type."""
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def _first(mine: Tensor, value: Tensor) -> str:
    if mine.shape != value.shape:
        return f"{tuple(mine.shape)} and {tuple(value.shape)}"
    distance = (mine.double() - value.double()).abs().nan_to_num(nan=torch.inf)
    place = tuple(int(i) for i in torch.unravel_index(distance.argmax(), distance.shape)) if distance.ndim else ()
    return f"at {place} {mine[place].item()} and {value[place].item()}"
