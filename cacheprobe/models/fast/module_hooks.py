"""Registers PyTorch hooks on a module that pass its input or output to a function, or let the function replace it."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from cacheprobe.core.hook_names import OUTPUT_POINT
from cacheprobe.core.live import ModuleValue

Cut = Callable[[Tensor], Tensor]
"""Function that splits a module's tensor [b, t, w] into a site's tensor [b, t, h, d]."""

ModulePoint = tuple[nn.Module, str]
"""(module of the plain model, side): the side says whether the module's input or its output is read."""

_Inputs = tuple[tuple[ModuleValue, ...], dict[str, ModuleValue]]


def change(place: ModulePoint, edit: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
    """Registers a PyTorch hook at `place`, a module's input or output: `edit` gets the tensor, and a tensor that `edit`
    returns replaces it. Returns the handle that removes the hook."""
    module, point = place
    if point == OUTPUT_POINT:

        def on_output(module: nn.Module, args: tuple[ModuleValue, ...], output: ModuleValue) -> ModuleValue:
            """Returns the module's output with its first tensor edited; None if `edit` returned None."""
            if not isinstance(output, tuple):
                return edit(output)
            edited = edit(output[0])
            return None if edited is None else (edited, *output[1:])

        return module.register_forward_hook(on_output)

    def on_input(module: nn.Module, args: tuple[ModuleValue, ...], kwargs: dict[str, ModuleValue]) -> _Inputs | None:
        """Returns (args, kwargs) of the module with the first tensor edited; None if `edit` returned None."""
        name = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs), "")
        edited = edit(args[0] if args else kwargs[name])
        if edited is None:
            return None
        return ((edited, *args[1:]), kwargs) if args else (args, {**kwargs, name: edited})

    return module.register_forward_pre_hook(on_input, with_kwargs=True)


def listen(place: ModulePoint, listener: Callable[[Tensor], object]) -> RemovableHandle:
    """Registers a PyTorch hook that calls `listener` with a module's input or output and changes no values. Returns the
    handle that removes the hook."""

    def keep(value: Tensor) -> None:
        """Calls the listener and returns None, so that the tensor stays unchanged."""
        listener(value)

    return change(place, keep)
