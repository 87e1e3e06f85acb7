"""A float64 model without roundings to float32 on its way.

Libraries widen what is narrower than float32 for norms, rotations and softmaxes, and in the same words narrow float64:
`values.to(torch.float32)`. A model that was loaded to tell how far from the truth the others are would stop at 1e-7.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


def keeping_float64(dtype: torch.dtype) -> AbstractContextManager[object]:
    """Around forwards of a model of this dtype: what is float64 stays it. Nothing at all for any other dtype."""
    return _KeepingFloat64() if dtype == torch.float64 else nullcontext()


class _KeepingFloat64(TorchFunctionMode):
    """A float64 tensor that is told to become float32 stays as it is, and so does a sum or softmax of it."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            args = [torch.float64 if one is torch.float32 else one for one in args]
            if named.get("dtype") is torch.float32:
                named["dtype"] = torch.float64
        return func(*args, **named)
