"""Compiles bfloat16 matrix products on this machine, for a CPU on which torch's are emulated or no faster than
float32."""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from cacheprobe.ops.compiled.build import CompilerError, library


class CompiledProduct:
    """Computes values weight^T + bias of bfloat16 tensors in compiled C++. The bits of an output vector do not depend
    on the other vectors, nor on how many there are.

    Twin: torch.nn.functional.linear in float32, rounded once: to one unit in the last place, for the order of sums.
    """

    def __init__(self, folder: Path) -> None:
        """Loads the compiled library from `folder` (builds it there if absent) and tests it. Raises: CompilerError if
        it cannot be built or gives wrong results."""
        loaded, self.digest = library("product.cpp", folder)
        self._run = loaded.cacheprobe_product
        self._run.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_long] * 3 + [ctypes.c_int]
        self._run.restype = ctypes.c_int
        _compare_with_torch(self)

    def __repr__(self) -> str:
        return f"CompiledProduct({self.digest})"

    def __call__(self, values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns values weight^T + bias, [..., o], from values [..., i], weight [o, i] and bias [o] or None, all
        bfloat16. Raises: TypeError for another dtype, ValueError for another width, MemoryError."""
        rows, inner = values.numel() // values.shape[-1], values.shape[-1]
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


def _compare_with_torch(product: CompiledProduct) -> None:
    """Compares the compiled product with torch's at several shapes. Raises: CompilerError if they differ."""
    generator = torch.Generator().manual_seed(0)
    for rows, inner, width in ((1, 64, 16), (7, 100, 37), (31, 24, 19), (300, 1000, 5)):
        values, weight, bias = (
            torch.randn(size, generator=generator).bfloat16() for size in ((rows, inner), (width, inner), (width,))
        )
        expected = torch.nn.functional.linear(values.float(), weight.float(), bias.float())
        error = (product(values, weight, bias).float() - expected).abs()
        # 2**-8 of a number: the rounding to bfloat16; 1e-5: sums in another order
        if not bool((error <= expected.abs() * 2**-8 + 1e-5).all()):
            raise CompilerError(
                f"the compiled product is {float(error.max()):.3g} away from torch's at {rows} rows of {inner}; name "
                'another compiler in CXX, or leave out products="compiled"'
            )
