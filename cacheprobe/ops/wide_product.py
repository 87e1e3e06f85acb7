"""Computes matrix products of many 16-bit vectors in float32, for a CPU without fast 16-bit arithmetic."""

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import linear

WIDE_ROWS = 32
"""From this many vectors on, converting the weights to float32 for one product saves more time than it costs, with one
or two threads."""
WIDE_ROWS_IN_LANES = 64
"""The same limit for a CPU that computes bfloat16 only in vector lanes: one instruction does twice the work of
float32's at half the rate."""

_OUTPUTS, _NUMBERS = 192, 2**18
"""How much of the weights is converted to float32 at once. The number of outputs is a multiple of _OUTPUTS: for fewer,
MKL's products of few vectors are several times slower. _NUMBERS is the approximate count of weights, which fit into a
core's cache."""

_INSTRUCTIONS = {torch.bfloat16: ("avx512_bf16", "amx_bf16"), torch.float16: ("avx512_fp16", "amx_fp16")}


def is_emulated(dtype: torch.dtype, device: torch.device) -> bool:
    """Returns True if products of this dtype run on an x86-64 CPU that has no instructions for the dtype, and so
    emulates them slowly."""
    return device.type == "cpu" and dtype in _INSTRUCTIONS and _lacks(_INSTRUCTIONS[dtype])


@cache
def _lacks(instructions: tuple[str, ...]) -> bool:
    capabilities = torch.cpu.get_capabilities()
    return capabilities.get("architecture") == "x86_64" and not any(capabilities.get(name) for name in instructions)


def wide_rows(dtype: torch.dtype, device: torch.device) -> int | None:
    """Returns the least number of vectors for which a product of this dtype on this device is computed in float32; None
    if no product is."""
    if is_emulated(dtype, device):
        return WIDE_ROWS
    return WIDE_ROWS_IN_LANES if device.type == "cpu" and dtype == torch.bfloat16 and _has_lanes_alone() else None


def widening(from_rows: int | None) -> str:
    """Returns a limit of `wide_rows` as text for the schedule fingerprint: "from N rows", or "never" for None."""
    return "never" if from_rows is None else f"from {from_rows} rows"


@cache
def _has_lanes_alone() -> bool:
    """Returns True if this is an Intel CPU with bfloat16 vector lanes but without bfloat16 matrix units."""
    capabilities = torch.cpu.get_capabilities()
    is_intel = str(capabilities.get("cpu_name", "")).startswith("Intel")
    return is_intel and bool(capabilities.get("avx512_bf16")) and not capabilities.get("amx_bf16")


def wide_product(values: Tensor, weight: Tensor, bias: Tensor | None = None, from_rows: int = WIDE_ROWS) -> Tensor:
    """Returns values weight^T + bias, from [..., i] and [o, i] to [..., o], in the dtype of `values`.

    From `from_rows` vectors on, both factors are converted to float32, the weights part by part, and each sum is
    rounded once. The decision depends only on the number of vectors in a pass, not on their contents, so it belongs to
    the schedule.
    Twin: torch.nn.functional.linear, equal to one unit in the last place of the largest sum: the order of sums differs.
    """
    if values.numel() < from_rows * values.shape[-1]:
        return linear(values, weight, bias)
    return widened(values, weight, bias)


def widened(values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns values weight^T + bias, computed in float32 and rounded to the dtype of `values`."""
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
    """Returns how many outputs of a product have their weights converted to float32 at once, a multiple of 192."""
    numbers = _NUMBERS * (1 if rows < 2 * WIDE_ROWS else 4)
    return _OUTPUTS * max(numbers // (_OUTPUTS * num_inputs), 1)
