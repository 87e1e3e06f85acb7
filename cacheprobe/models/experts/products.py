"""Computes products and activations whose bits do not depend on which other tokens are computed with them."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

RowProduct = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Function (values, weight, bias) -> values weight^T + bias."""

_NUMBERS_AT_ONCE = 2**15 - 1
"""torch computes so many numbers in one thread, without a split at a place that depends on their number."""
_EVEN = 64
"""Numbers of a loop step of torch in 16 bits. The rest of a loop has other code, and may get other bits."""


def rows_alone(values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns values weight^T + bias, [n, o], from values [n, i]: one product for each of the n rows. Each row is
    copied, because a library may use other code for another memory address."""
    if not len(values):
        return linear(values, weight, bias)
    return torch.cat([linear(row.clone()[None], weight, bias) for row in values])


def in_even_parts(f: Callable[[Tensor], Tensor], values: Tensor, parts: int = 1) -> Tensor:
    """Returns f(values) of values [n, w], for a function that treats each row alike. On a CPU computes as many rows at
    once as give the same bits as one: all steps of torch's loops are whole, or there is one row.

    parts: a row consists of so many parts of equal width, from which `f` computes element by element.
    """
    n, width = values.shape
    if values.device.type != "cpu" or n <= 1:
        return f(values)
    at_once = max(1, _NUMBERS_AT_ONCE // width) if width % (parts * _EVEN) == 0 else 1
    return torch.cat([f(part.clone()) for part in values.split(at_once)])


def padded(f: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """Returns f(values) of values [n, w], for a function of each number, as `in_even_parts` on rows with zeros at their
    end."""
    return in_even_parts(f, pad(values, (0, -values.shape[-1] % _EVEN)))[:, : values.shape[-1]]
