"""Runs a float64 model without intermediate rounding to float32.

Libraries convert inputs of norms, rotations and softmaxes to float32 with `values.to(torch.float32)`. This widens
16-bit numbers but narrows float64. Without this file, a float64 reference model would be exact to 1e-7 only.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


def keeping_float64(dtype: torch.dtype) -> AbstractContextManager[object]:
    """Returns a context manager. Inside its `with`, torch calls on a float64 tensor that name float32
    (`.to(torch.float32)`, `.float()`, `dtype=torch.float32`) keep float64; `.to(other_tensor)` still converts. Does
    nothing if `dtype` is not float64."""
    return _KeepingFloat64() if dtype == torch.float64 else nullcontext()


class _KeepingFloat64(TorchFunctionMode):
    """Changes torch calls inside its `with`: a call on a float64 tensor that names float32 gives float64."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        named = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            args = [torch.float64 if one is torch.float32 else one for one in args]
            if named.get("dtype") is torch.float32:
                named["dtype"] = torch.float64
        return func(*args, **named)
