"""Products of many 16-bit rows on a CPU that has no 16-bit arithmetic."""

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import linear

WIDE_ROWS = 64
"""From this many rows on, widening the weights for one product costs less than it saves, at one and at two threads."""

_INSTRUCTIONS = {torch.bfloat16: ("avx512_bf16", "amx_bf16"), torch.float16: ("avx512_fp16", "amx_fp16")}


def is_emulated(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products of this type run on a CPU of x86-64 that lacks their instructions."""
    return device.type == "cpu" and dtype in _INSTRUCTIONS and _lacks(_INSTRUCTIONS[dtype])


@cache
def _lacks(instructions: tuple[str, ...]) -> bool:
    capabilities = torch.cpu.get_capabilities()
    return capabilities.get("architecture") == "x86_64" and not any(capabilities.get(name) for name in instructions)


def wide_product(values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """values weight^T + bias, [... i] and [o i] -> [... o], in the type of `values`.

    From WIDE_ROWS rows on both factors are widened to float32 and the result is rounded once. The rows of a pass
    decide, not their contents, so it is a part of the schedule.
    Twin: torch.nn.functional.linear, equal to one unit in the last place of the largest sum: the order of sums differs.
    """
    if values.numel() < WIDE_ROWS * values.shape[-1]:
        return linear(values, weight, bias)
    return linear(values.float(), weight.float(), None if bias is None else bias.float()).to(values.dtype)
