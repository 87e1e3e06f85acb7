"""Gathers rows of a pass into one block, in 16 or 8 bits per number."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor

KINDS = ("bfloat16", "int8")
LARGEST = 127
"""Largest int8 value used; -128 is not used."""


class Packed(NamedTuple):
    """Holds rows taken from a tensor, stored in 16 or 8 bits: row i is `values[i] * scales[i]`."""

    values: Tensor
    """[n, m] bfloat16 or int8."""
    scales: Tensor
    """[n] float32. For bfloat16 always 1; for int8 NaN if the row held NaN or infinity, or lies outside the source."""


def pack_rows(states: Float[Tensor, "b t m"], rows: Int[Tensor, "n"], kind: str) -> Packed:
    """Returns rows b * t + slot of states (any strides) in a smaller type.

    kind: bfloat16, rounded to nearest, ties to even; or int8, each row scaled by its largest absolute number. A row
    outside the source becomes NaN.
    Raises: ValueError for an unknown kind.
    Twin: tests.twins.kernels_slowly.pack_rows_slowly, ==.
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
    """Returns the numbers as float32, with the rounding of `pack_rows`."""
    return packed.values.float() * packed.scales[:, None]
