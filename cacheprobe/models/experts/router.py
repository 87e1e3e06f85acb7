"""Runs a router with a batch-invariant product, and lets edits change its logits."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from cacheprobe.core.live import LiveModule, ModuleValue
from cacheprobe.models.experts.products import RowProduct, padded

LogitEdit: TypeAlias = Callable[[Tensor], Tensor | None]
"""Function of the router's logits [n, e]: returns the new logits, or None to leave them unchanged."""


class RouterForward:
    """Replaces the forward of a router. Runs the router's own code, in which the linear product and the sigmoid are
    batch-invariant, and edits the logits that the product gives.

    Twin: the router's own forward, the same ids, weights close(1e-5) in float32.
    """

    def __init__(self, router: nn.Module, product: RowProduct) -> None:
        self.router, self.product = router, product
        self.edits: list[LogitEdit] = []

    def __call__(self, *args: ModuleValue, **kwargs: ModuleValue) -> ModuleValue:
        """Returns what the router's own forward returns."""
        with _RouterFunctions(self):
            return type(self.router).forward(self.router, *args, **kwargs)

    def logits(self, values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns the logits [..., e] of values [..., m], after the edits."""
        logits = self.product(values.reshape(-1, values.shape[-1]), weight, bias)
        for edit in self.edits:
            edited = edit(logits)
            logits = logits if edited is None else edited
        return logits.view(*values.shape[:-1], -1)


class _RouterFunctions(TorchFunctionMode):
    """Replaces torch's functions `linear` and `sigmoid` while one router runs."""

    def __init__(self, forward: RouterForward) -> None:
        super().__init__()
        self.forward = forward

    def __torch_function__(
        self,
        func: Callable[..., ModuleValue],
        types: object,
        args: tuple[ModuleValue, ...] = (),
        kwargs: dict[str, ModuleValue] | None = None,
    ) -> ModuleValue:
        """Returns the result of torch's function `func`, or of its replacement."""
        kwargs = kwargs or {}
        if func is linear:
            return self.forward.logits(*args, **kwargs)
        if func in (torch.sigmoid, Tensor.sigmoid, torch.nn.functional.sigmoid) and args[0].dim() == 2:
            return padded(torch.sigmoid, args[0])
        return func(*args, **kwargs)


def forward_of(router: LiveModule) -> RouterForward | None:
    """Returns the RouterForward that replaces a router's forward; None if nothing was replaced."""
    found = vars(router).get("forward")
    return found if isinstance(found, RouterForward) else None
