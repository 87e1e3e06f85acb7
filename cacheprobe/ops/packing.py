"""Rows of a pass gathered into a block of their own, in 16 or in 8 bits."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor

KINDS = ("bfloat16", "int8")
LARGEST = 127
"""Of int8, whose -128 is not used."""


class Packed(NamedTuple):
    """Gathered rows. A row's numbers are values * scale."""

    values: Tensor
    """[n, m] bfloat16 or int8."""
    scales: Tensor
    """[n] float32. 1 in bfloat16; NaN for a row of int8 that held NaN or infinity, or that is no row of the source."""


def pack_rows(states: Float[Tensor, "b t m"], rows: Int[Tensor, "n"], kind: str) -> Packed:
    """Rows b * t + slot of states, of any strides, in another type.

    kind: bfloat16, rounded to the nearest, ties to even; or int8, each row by its largest absolute number.
    A row outside the source becomes NaN.
    Raises: ValueError for an unknown kind.
    Twin: tests.kernels_slowly.pack_rows_slowly, ==.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r} of packed rows; kinds are {', '.join(KINDS)}")
    flat = states.flatten(0, 1)
    is_row = (rows >= 0) & (rows < len(flat))
    taken = flat[rows.clamp(0, len(flat) - 1)].float().masked_fill_(~is_row[:, None], torch.nan)
    if kind == "bfloat16":
        return Packed(taken.to(torch.bfloat16), torch.ones(len(rows), device=states.device))
    scales = taken.abs().amax(-1) / LARGEST
    is_finite = torch.isfinite(taken).all(-1)
    divisor = torch.where(is_finite & (scales > 0), scales, 1.0)
    values = torch.where(is_finite[:, None], taken / divisor[:, None], 0.0).round()
    return Packed(values.to(torch.int8), torch.where(is_finite, scales, torch.nan))


def unpack(packed: Packed) -> Float32[Tensor, "n m"]:
    """The numbers, up to what packing has rounded away."""
    return packed.values.float() * packed.scales[:, None]
