"""Computes matrix products of a CPU in loops that numba compiles: batch-invariant, without a C++ compiler."""

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import linear, pad

from cacheprobe.ops.compiled.lanes import FLOATS, FORMATS, INNER_STEP, KINDS, OUTPUTS, TILES
from cacheprobe.ops.compiled.queue import Queue
from cacheprobe.ops.compiled.tiles import SIDE


class CompiledProduct:
    """Computes values weight^T + bias in loops compiled by numba. The bits of an output vector do not depend on the
    other vectors, on how many there are, or on the number of threads.

    kind FLOATS: float32 arithmetic, on tensors of float32 or 16 bits.  PAIRS: the processor's dot products of bfloat16.
    TILES: its matrix units for bfloat16. PAIRS and TILES take denormal factors, products and sums as zero.
    Twin: torch.nn.functional.linear in float64, to one unit in the last place of the dtype or of the largest term, and
    to the smallest normal number.
    """

    def __init__(self, kind: int) -> None:
        self.kind = kind

    def __repr__(self) -> str:
        return f"CompiledProduct({KINDS[self.kind]})"

    def __call__(self, values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns values weight^T + bias, [..., o], from values [..., i], weight [o, i] and bias [o] or None.

        Raises: TypeError for tensors of several dtypes or of a dtype without such a product, ValueError for another
        width or device. With gradients (not in forward mode), torch computes the product.
        """
        if torch.is_grad_enabled() and any(p is not None and p.requires_grad for p in (values, weight, bias)):
            return linear(values, weight, bias)
        require_operands(self.kind, values, weight, bias)
        if not weight.numel():
            return linear(values, weight, bias)
        queue = Queue(self.kind, weight.dtype)
        out = queue.product(values.contiguous(), weight.contiguous(), bias)
        queue.run()
        return out


def require_operands(kind: int, values: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raises: TypeError and ValueError as CompiledProduct."""
    dtypes = {part.dtype for part in (values, weight, bias) if part is not None}
    if len(dtypes) > 1 or weight.dtype not in (FORMATS if kind == FLOATS else (torch.bfloat16,)):
        raise TypeError(f"compiled products of {kind=} are not of {', '.join(map(str, dtypes))}")
    if {part.device.type for part in (values, weight, bias) if part is not None} != {"cpu"}:
        raise ValueError(f"compiled products are of CPU tensors, not of {values.device} and {weight.device}")
    if weight.ndim != 2 or weight.shape[1] != values.shape[-1]:
        raise ValueError(f"values of width {values.shape[-1]} and a weight {tuple(weight.shape)} do not make a product")
    if bias is not None and bias.shape != (len(weight),):
        raise ValueError(f"a bias {tuple(bias.shape)} for a weight {tuple(weight.shape)}")


def operands(kind: int, values: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor, int]:
    """Returns (values, weight, bias, inner width) as the loops that read states take them: contiguous, with an inner
    width that is a multiple of INNER_STEP (zeros are appended), values in float32 for kind FLOATS and packed for TILES,
    the bias in float32 (four zeros without a bias).

    Raises: TypeError and ValueError as CompiledProduct.
    """
    require_operands(kind, values, weight, bias)
    inner = values.shape[-1]
    if kind == FLOATS:
        values = values.float()
    if over := -inner % INNER_STEP[kind] if inner else INNER_STEP[kind]:
        values, weight = pad(values, (0, over)), pad(weight, (0, over))
    if kind == TILES:
        pairs = pad(values, (0, 0, 0, -len(values) % SIDE)).contiguous().view(torch.int32)
        values = rearrange(pairs, "(b r) p -> b p r", r=SIDE).contiguous().view(torch.bfloat16)
    added = torch.zeros(OUTPUTS) if bias is None else bias.float().contiguous()
    return values.contiguous(), weight.contiguous(), added, inner + over
