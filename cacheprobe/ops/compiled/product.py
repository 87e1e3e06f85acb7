"""Computes matrix products of a CPU in loops that numba compiles: batch-invariant, without a C++ compiler."""

from functools import cache

import numpy as np
import torch
from numba.core.ccallback import CFunc
from torch import Tensor
from torch.nn.functional import linear, pad

from cacheprobe.ops.compiled.basics import run_on_threads
from cacheprobe.ops.compiled.lanes import BFLOAT16, FLOAT16, FLOAT32, FLOATS, INNER_STEP, OUTPUTS, PAIRS, ROWS
from cacheprobe.ops.compiled.loops import product_work

FORMATS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
"""Format of the loops, by dtype of the weight."""

_VALUES_AT_ONCE = {FLOATS: 2**18, PAIRS: 2**15}
"""Bytes of the values that one pass over a panel of the weight uses: they stay in a core's cache. For FLOATS, more rows
share the conversion of the weight."""

_PANEL = 64
"""Most outputs that a thread takes at once."""

_LITTLE = 2**18
"""Up to this many multiplications one thread is faster than two, because to wake a thread takes time."""


class CompiledProduct:
    """Computes values weight^T + bias in loops compiled by numba. The bits of an output vector do not depend on the
    other vectors, on how many there are, or on the number of threads.

    kind FLOATS: float32 arithmetic, on tensors of float32 or 16 bits.  PAIRS: the processor's dot products of bfloat16.
    Twin: torch.nn.functional.linear in float64, to one unit in the last place of the dtype or of the largest term.
    """

    def __init__(self, kind: int) -> None:
        self.kind = kind

    def __repr__(self) -> str:
        return f"CompiledProduct({'pairs of bfloat16' if self.kind == PAIRS else 'float32'})"

    def __call__(self, values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns values weight^T + bias, [..., o], from values [..., i], weight [o, i] and bias [o] or None.

        Raises: TypeError for tensors of several dtypes or of a dtype without such a product, ValueError for another
        width or device. With gradients, torch computes the product.
        """
        if torch.is_grad_enabled() and any(p is not None and p.requires_grad for p in (values, weight, bias)):
            return linear(values, weight, bias)
        values, weight, added, inner = operands(self.kind, values, weight, bias)
        rows, width = values.numel() // max(inner, 1), len(weight)
        dtype = weight.dtype
        out = torch.empty(*values.shape[:-1], width, dtype=dtype)
        block = rows_at_once(self.kind, inner * values.element_size())
        shared = -(-width // (4 * torch.get_num_threads()))  # several panels for each thread
        panel = min(_PANEL, -(-shared // OUTPUTS) * OUTPUTS)
        call = np.array(
            (
                values.data_ptr(), weight.data_ptr(), added.data_ptr(), out.data_ptr(), rows, inner, width,
                inner * values.element_size(), inner * weight.element_size(), width * out.element_size(), block, panel,
                values.dtype != weight.dtype, 0 if bias is None else 4, 0, 0,
            ),
            np.int64,
        )  # fmt: skip
        run_on_threads(_loops(self.kind, FORMATS[dtype]), call, rows * inner * width <= _LITTLE)
        if call[15] != -(-width // panel):  # compiled loops print an error and return
            raise RuntimeError(f"a product ended after {call[15]} of {-(-width // panel)} panels")
        return out


@cache
def _loops(kind: int, format: int) -> CFunc:
    return product_work(kind, format)


def rows_at_once(kind: int, row_bytes: int) -> int:
    """Returns how many rows of values share one pass over a part of the weight."""
    return max(ROWS, _VALUES_AT_ONCE[kind] // row_bytes // ROWS * ROWS)


def operands(kind: int, values: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor, int]:
    """Returns (values, weight, bias, inner width) as the loops read them: contiguous, with an inner width that is a
    multiple of INNER_STEP (zeros are appended), values in float32 for kind FLOATS, the bias in float32 (four zeros
    without a bias).

    Raises: TypeError and ValueError as CompiledProduct.
    """
    dtypes = {part.dtype for part in (values, weight, bias) if part is not None}
    if len(dtypes) > 1 or weight.dtype not in (FORMATS if kind == FLOATS else (torch.bfloat16,)):
        raise TypeError(f"compiled products of {kind=} are not of {', '.join(map(str, dtypes))}")
    if {part.device.type for part in (values, weight, bias) if part is not None} != {"cpu"}:
        raise ValueError(f"compiled products are of CPU tensors, not of {values.device} and {weight.device}")
    inner = values.shape[-1]
    if weight.ndim != 2 or weight.shape[1] != inner:
        raise ValueError(f"values of width {inner} and a weight {tuple(weight.shape)} do not make a product")
    if kind == FLOATS:
        values = values.float()
    if over := -inner % INNER_STEP[kind] if inner else INNER_STEP[kind]:
        values, weight = pad(values, (0, over)), pad(weight, (0, over))
    if bias is not None and bias.shape != (len(weight),):
        raise ValueError(f"a bias {tuple(bias.shape)} for a weight {tuple(weight.shape)}")
    added = torch.zeros(OUTPUTS) if bias is None else bias.float().contiguous()
    return values.contiguous(), weight.contiguous(), added, inner + over
