"""Rounds state vectors to int8 for storage (capture dtype "int8"), and gives them back as float32.

A vector [m] is stored as m + 4 numbers of int8: its codes, from -127 to 127, and the four bytes of its scale, a
little-endian float32. A stored tensor has the shape [..., m + 4], so every operation on rows applies to it unchanged.
"""

import torch
from torch import Tensor

INT8 = "int8"
SCALE_BYTES = 4
_LARGEST_CODE = 127
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""Smallest scale: the smallest float32 that is not subnormal, so that no code exceeds 127."""


def kept_dtype(name: str | None, model_dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which states are captured in a pass. name: of `CaptureConfig.dtype`; the model's dtype for
    None, and for "int8", whose states are rounded after the pass."""
    return model_dtype if name is None or name == INT8 else getattr(torch, name)


def encode(states: Tensor) -> Tensor:
    """Rounds vectors [..., m] of floats to int8; returns [..., m + 4], as this file says.

    Symmetric: scale = max|x| / 127, at least 2**-126; code = round(x / scale), halves to even. A zero vector keeps its
    zeros. A vector with NaN or infinity gets the scale NaN: all of it is NaN when it is read, because no scale fits it.
    """
    if not states.numel():
        return torch.zeros(*states.shape[:-1], states.shape[-1] + SCALE_BYTES, dtype=torch.int8)
    values = states.to(torch.promote_types(states.dtype, torch.float32))
    scale = (values.abs().amax(-1, keepdim=True) / _LARGEST_CODE).float().clamp(min=_SMALLEST_SCALE)
    scale = torch.where((scale * _LARGEST_CODE).isfinite(), scale, torch.nan)
    codes = (values / scale).round().nan_to_num(0.0).clamp(-_LARGEST_CODE, _LARGEST_CODE)
    return torch.cat([codes.to(torch.int8), scale.view(torch.int8)], -1)


def decode(stored: Tensor) -> Tensor:
    """Returns stored vectors as floats: those of `encode` as float32 [..., m], code x scale; all others unchanged.

    float32, because rounding to bfloat16 would add an error of the size of the first. A number differs from the
    captured one by at most half a scale, max|x| / 254, and the rounding of float32.
    """
    if stored.dtype != torch.int8:
        return stored
    if not stored.numel():
        return stored[..., :-SCALE_BYTES].float()
    return stored[..., :-SCALE_BYTES] * stored[..., -SCALE_BYTES:].contiguous().view(torch.float32)
