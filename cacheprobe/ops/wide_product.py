"""Products of many 16-bit rows on a CPU that has no 16-bit arithmetic."""

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import linear

WIDE_ROWS = 32
"""From this many rows on, widening the weights for one product costs less than it saves, at one and at two threads."""

_OUTPUTS, _NUMBERS = 192, 2**18
"""Of the weights that are widened at once: outputs are a multiple of the first, under which products of few rows are
slower by a factor (MKL), and there are about so many numbers, which stay in a core's own cache."""

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

    From WIDE_ROWS rows on both factors are widened to float32, the weights part by part, and each sum is rounded once.
    The rows of a pass decide, not their contents, so it is a part of the schedule.
    Twin: torch.nn.functional.linear, equal to one unit in the last place of the largest sum: the order of sums differs.
    """
    if values.numel() < WIDE_ROWS * values.shape[-1]:
        return linear(values, weight, bias)
    return widened(values, weight, bias)


def widened(values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same of any number of rows: every product in float32."""
    rows = values.numel() // values.shape[-1]
    size, num_outputs = outputs_at_once(rows, weight.shape[1]), weight.shape[0]
    wide = values.reshape(rows, -1).float()
    out = values.new_empty(rows, num_outputs)
    for start in range(0, num_outputs, size):
        end = min(start + size, num_outputs)
        product = wide @ weight[start:end].float().T
        if bias is not None:
            product += bias[start:end]
        out[:, start:end] = product
    return out.view(*values.shape[:-1], num_outputs)


def outputs_at_once(rows: int, num_inputs: int) -> int:
    """How many outputs' weights are widened at once: more of them where many rows make the product the larger work."""
    numbers = _NUMBERS * (1 if rows < 2 * WIDE_ROWS else 4)
    return _OUTPUTS * max(numbers // (_OUTPUTS * num_inputs), 1)
