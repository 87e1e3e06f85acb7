"""Copies chosen rows of a pass into one block of 16 or 8 bits per number, and converts such a block back to float32."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor

KINDS = ("bfloat16", "int8")
LARGEST = 127
"""Largest absolute int8 value used; -128 is not used."""


class Packed(NamedTuple):
    """Holds vectors in 16 or 8 bits per number: vector i is `values[i] * scales[i]`."""

    values: Tensor
    """[n, m] bfloat16 or int8."""
    scales: Tensor
    """[n] float32. For bfloat16 always 1. For int8 NaN if the vector had NaN or infinity, or lay outside the source."""


def pack_rows(states: Float[Tensor, "b t m"], rows: Int[Tensor, "n"], kind: str) -> Packed:
    """Returns the state vectors numbered `rows` as a Packed, in bfloat16 or int8. Number i * t + slot is token slot
    `slot` of batch index i in states [b, t, m].

    kind: bfloat16, rounded to nearest, ties to even; or int8, each vector scaled by its largest absolute number. A row
    number outside the source gives NaN.
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
    """Returns the vectors of a Packed as float32 [n, m]; the rounding of `pack_rows` remains."""
    return packed.values.float() * packed.scales[:, None]
