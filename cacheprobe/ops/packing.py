"""Copies chosen rows of a pass into a block of captured states."""

from jaxtyping import Float, Int
from torch import Tensor


def pack_rows(states: Float[Tensor, "b t m"], rows: Int[Tensor, "n"], out: Float[Tensor, "n m"]) -> None:
    """Writes the state vectors numbered `rows` to `out`, in place, in the dtype of `out`. Number i * t + slot is token
    slot `slot` of batch index i.

    Numbers are rounded to nearest, ties to even. A line of `out` whose number lies outside the source stays unchanged.
    Twin: tests.twins.kernels_slowly.pack_rows_slowly, ==.
    """
    flat = states.flatten(0, 1)
    is_row = (rows >= 0) & (rows < len(flat))
    out[is_row] = flat[rows[is_row]].to(out.dtype)
