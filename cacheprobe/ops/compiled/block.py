"""Compiles, on this machine, the norm and the rotation of a llama-like block."""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from cacheprobe.ops.compiled.build import CompilerError, library
from cacheprobe.ops.plain import rms_norm


class CompiledBlock:
    """Norm and rotation of bfloat16 numbers. The bits of a row depend only on that row.

    Twin: torch's own operations: the rotation bitwise, the norm to one unit in the last place, since the squares are
    summed in another order.
    """

    def __init__(self, folder: Path) -> None:
        """folder: where the library is kept. Raises: CompilerError if the code cannot be compiled or gives wrong
        results."""
        loaded, self.digest = library("block.cpp", folder)
        self._norm, self._turn = loaded.cacheprobe_rms_norm, loaded.cacheprobe_turn
        self._norm.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_long] * 2 + [ctypes.c_float, ctypes.c_int]
        self._turn.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_long] * 3 + [ctypes.c_int]
        self._norm.restype = self._turn.restype = None
        _try(self)

    def __repr__(self) -> str:
        return f"CompiledBlock({self.digest})"

    def rms_norm(self, values: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Returns the normalised values [..., m]; weight [m]. Source: Zhang & Sennrich 2019 (arXiv 1910.07467),
        equation 4."""
        values, weight, width = _numbers(values), _numbers(weight), values.shape[-1]
        if weight.numel() != width:
            raise ValueError(f"values of width {width} are not scaled by {weight.numel()} weights")
        out = torch.empty_like(values)
        where = values.data_ptr(), weight.data_ptr(), out.data_ptr()
        self._norm(*where, values.numel() // width, width, eps, torch.get_num_threads())
        return out

    def turn_(self, values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotates values [b, t, h, d] in place by cos and sin [b, t, 1, d]; the first half of `sin` must be negated.

        Source: Su et al. 2021 (arXiv 2104.09864), section 3.4.2, with the halves of GPT-NeoX.
        """
        if not values.is_contiguous() or values.dtype != torch.bfloat16:
            raise ValueError(f"only bfloat16 that lies in order is rotated in place, not {values.dtype}")
        b, t, heads, width = values.shape
        cos, sin = (_numbers(part.expand(b, t, 1, width)) for part in (cos, sin))
        where = values.data_ptr(), cos.data_ptr(), sin.data_ptr()
        self._turn(*where, b * t, heads, width, torch.get_num_threads())
        return values


def _numbers(values: Tensor) -> Tensor:
    if values.dtype != torch.bfloat16:
        raise TypeError(f"compiled operations are of bfloat16, not {values.dtype}")
    return values.contiguous()


def _try(block: CompiledBlock) -> None:
    """Compares the compiled operations with torch's at several widths, since compilers have bugs. Raises:
    CompilerError."""
    generator = torch.Generator().manual_seed(0)
    for width in (24, 64, 200):
        rows, weight, heads, cos, sin = (
            torch.randn(size, generator=generator).bfloat16()
            for size in ((5, width), (width,), (2, 3, 4, width), (2, 3, 1, width), (2, 3, 1, width))
        )
        first, second = heads.chunk(2, -1)
        wanted = rms_norm(rows, weight, 1e-5)
        turned = heads * cos + torch.cat((second, first), -1) * sin
        far = (block.rms_norm(rows, weight, 1e-5).float() - wanted.float()).abs()
        if not bool((far <= wanted.float().abs() * 2**-7).all()) or not torch.equal(
            block.turn_(heads.clone(), cos, sin), turned
        ):
            raise CompilerError(
                f"the compiled norm or rotation of width {width} is not torch's; name another compiler in CXX, or "
                'leave out products="compiled"'
            )
