"""Compiles, on this machine, the RMSNorm and the rotary embedding of a llama-like block for bfloat16."""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from cacheprobe.ops.compiled.build import CompilerError, library
from cacheprobe.ops.plain import rms_norm


class CompiledBlock:
    """Computes RMSNorm and the rotary embedding of bfloat16 numbers in compiled C++. The bits of a vector depend on no
    other vector of the batch.

    Twin: torch's own operations: the rotation bitwise, the norm to one unit in the last place, since the squares are
    summed in another order.
    """

    def __init__(self, folder: Path) -> None:
        """Loads the compiled library from `folder` (builds it there if absent) and tests it. Raises: CompilerError if
        it cannot be built or gives wrong results."""
        loaded, self.digest = library("block.cpp", folder)
        self._norm, self._turn = loaded.cacheprobe_rms_norm, loaded.cacheprobe_turn
        self._norm.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_long] * 2 + [ctypes.c_float, ctypes.c_int]
        self._turn.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_long] * 3 + [ctypes.c_int]
        self._norm.restype = self._turn.restype = None
        _compare_with_torch(self)

    def __repr__(self) -> str:
        return f"CompiledBlock({self.digest})"

    def rms_norm(self, values: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Returns the normalised values [..., m], scaled by weight [m], all bfloat16. Raises: TypeError for another
        dtype; ValueError for another number of weights. Source: Zhang & Sennrich 2019 (arXiv 1910.07467), equation
        4."""
        values, weight, width = _contiguous_bfloat16(values), _contiguous_bfloat16(weight), values.shape[-1]
        if weight.numel() != width:
            raise ValueError(f"values of width {width} are not scaled by {weight.numel()} weights")
        out = torch.empty_like(values)
        addresses = values.data_ptr(), weight.data_ptr(), out.data_ptr()
        self._norm(*addresses, values.numel() // width, width, eps, torch.get_num_threads())
        return out

    def turn_(self, values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Applies the rotary embedding to values [b, t, h, d] in place and returns them. cos, sin: [b, t, 1, d]; the
        first half of `sin` must be negated. Raises: ValueError for values of another dtype or not contiguous.

        Source: Su et al. 2021 (arXiv 2104.09864), section 3.4.2, with the halves of GPT-NeoX.
        """
        if not values.is_contiguous() or values.dtype != torch.bfloat16:
            raise ValueError(f"only bfloat16 that lies in order is rotated in place, not {values.dtype}")
        b, t, heads, width = values.shape
        cos, sin = (_contiguous_bfloat16(part.expand(b, t, 1, width)) for part in (cos, sin))
        addresses = values.data_ptr(), cos.data_ptr(), sin.data_ptr()
        self._turn(*addresses, b * t, heads, width, torch.get_num_threads())
        return values


def _contiguous_bfloat16(values: Tensor) -> Tensor:
    if values.dtype != torch.bfloat16:
        raise TypeError(f"compiled operations are of bfloat16, not {values.dtype}")
    return values.contiguous()


def _compare_with_torch(block: CompiledBlock) -> None:
    """Compares the compiled norm and rotation with torch's at several widths. Raises: CompilerError if they differ."""
    generator = torch.Generator().manual_seed(0)
    for width in (24, 64, 200):
        rows, weight, heads, cos, sin = (
            torch.randn(size, generator=generator).bfloat16()
            for size in ((5, width), (width,), (2, 3, 4, width), (2, 3, 1, width), (2, 3, 1, width))
        )
        first, second = heads.chunk(2, -1)
        expected = rms_norm(rows, weight, 1e-5)
        rotated = heads * cos + torch.cat((second, first), -1) * sin
        difference = (block.rms_norm(rows, weight, 1e-5).float() - expected.float()).abs()
        # 2**-7 of a number is at least one unit in the last place of its bfloat16
        if not bool((difference <= expected.float().abs() * 2**-7).all()) or not torch.equal(
            block.turn_(heads.clone(), cos, sin), rotated
        ):
            raise CompilerError(
                f"the compiled norm or rotation of width {width} is not torch's; name another compiler in CXX, or "
                'leave out products="compiled"'
            )
