"""Products of few bfloat16 rows, compiled on this machine: several times quicker where a CPU only emulates them."""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from cacheprobe.ops.compiled.build import CompilerError, library
from cacheprobe.ops.wide_product import WIDE_ROWS, wide_product, wide_rows

COMPILED_ROWS = 32
"""Products of fewer rows are compiled; others are torch's, or widened, which is as quick there."""


class CompiledProduct:
    """values weight^T + bias. Bits of a row depend on that row alone, of however few rows it is one.

    Twin: torch.nn.functional.linear in float32, rounded once: to one unit in the last place, for the order of sums.
    """

    def __init__(self, folder: Path) -> None:
        """folder: where the library is kept. Raises: CompilerError where it cannot be compiled, or is wrong."""
        loaded, self.digest = library("product.cpp", folder)
        self._run = loaded.cacheprobe_product
        self._run.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_long] * 3 + [ctypes.c_int]
        self._run.restype = ctypes.c_int
        _try(self)

    def __repr__(self) -> str:
        return f"CompiledProduct({self.digest})"

    def __call__(self, values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """[... i] and [o i] -> [... o], all bfloat16."""
        rows, inner = values.numel() // values.shape[-1], values.shape[-1]
        if rows >= COMPILED_ROWS:
            return wide_product(values, weight, bias, wide_rows(values.dtype, values.device) or WIDE_ROWS)
        if weight.shape[1] != inner:
            raise ValueError(f"values of width {inner} and a weight {tuple(weight.shape)} do not make a product")
        values, weight = values.contiguous(), weight.contiguous()
        bias = None if bias is None else bias.contiguous()
        if any(part is not None and part.dtype != torch.bfloat16 for part in (values, weight, bias)):
            raise TypeError(f"compiled products are of bfloat16, not {values.dtype} and {weight.dtype}")
        out = values.new_empty(*values.shape[:-1], len(weight))
        failed = self._run(
            values.data_ptr(),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            rows,
            inner,
            len(weight),
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError(f"no memory for a product of {rows} rows of {inner}")
        return out


def _try(product: CompiledProduct) -> None:
    """A compiler can be wrong: shapes with and without remainders, against float32. Raises: CompilerError."""
    generator = torch.Generator().manual_seed(0)
    for rows, inner, width in ((1, 64, 16), (7, 100, 37), (31, 24, 19)):
        values, weight, bias = (
            torch.randn(size, generator=generator).bfloat16() for size in ((rows, inner), (width, inner), (width,))
        )
        wanted = torch.nn.functional.linear(values.float(), weight.float(), bias.float())
        far = (product(values, weight, bias).float() - wanted).abs()
        if not bool((far <= wanted.abs() * 2**-8 + 1e-5).all()):
            raise CompilerError(
                f"the compiled product is {float(far.max()):.3g} away from torch's at {rows} rows of {inner}; name "
                'another compiler in CXX, or leave out products="compiled"'
            )
