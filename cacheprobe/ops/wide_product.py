"""Products of many 16-bit rows on a CPU whose 16-bit arithmetic is missing, or no quicker than float32's."""

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import linear

WIDE_ROWS = 32
"""From this many rows on, widening the weights for one product costs less than it saves, at one and at two threads."""
WIDE_ROWS_IN_LANES = 64
"""The same where bfloat16 is in vector lanes alone: an instruction does twice the work there, at half the rate."""

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


def wide_rows(dtype: torch.dtype, device: torch.device) -> int | None:
    """From how many rows on products of this type are widened here; None for never."""
    if is_emulated(dtype, device):
        return WIDE_ROWS
    return WIDE_ROWS_IN_LANES if device.type == "cpu" and dtype == torch.bfloat16 and _has_lanes_alone() else None


def widening(from_rows: int | None) -> str:
    """For a fingerprint."""
    return "never" if from_rows is None else f"from {from_rows} rows"


@cache
def _has_lanes_alone() -> bool:
    """Intel's, without matrix units: others' lanes do twice float32's work."""
    capabilities = torch.cpu.get_capabilities()
    is_intel = str(capabilities.get("cpu_name", "")).startswith("Intel")
    return is_intel and bool(capabilities.get("avx512_bf16")) and not capabilities.get("amx_bf16")


def wide_product(values: Tensor, weight: Tensor, bias: Tensor | None = None, from_rows: int = WIDE_ROWS) -> Tensor:
    """values weight^T + bias, [... i] and [o i] -> [... o], in the type of `values`.

    From `from_rows` rows on both factors are widened to float32, the weights part by part, each sum is rounded once.
    The rows of a pass decide, not their contents, so it is a part of the schedule.
    Twin: torch.nn.functional.linear, equal to one unit in the last place of the largest sum: the order of sums differs.
    """
    if values.numel() < from_rows * values.shape[-1]:
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
