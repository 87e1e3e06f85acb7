"""PyTorch hooks on a module that pass its input or output to a function, or let the function replace it."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from cacheprobe.core.hook_names import OUTPUT_POINT
from cacheprobe.core.live import ModuleValue
from cacheprobe.models.fast.places import Place

_Inputs = tuple[tuple[ModuleValue, ...], dict[str, ModuleValue]]


def change(place: Place, edit: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
    """Registers a hook that lets `edit` replace a module's input or output."""
    module, point = place
    if point == OUTPUT_POINT:

        def on_output(module: nn.Module, args: tuple[ModuleValue, ...], output: ModuleValue) -> ModuleValue:
            """Returns the edited output, None if unchanged."""
            if not isinstance(output, tuple):
                return edit(output)
            edited = edit(output[0])
            return None if edited is None else (edited, *output[1:])

        return module.register_forward_hook(on_output)

    def on_input(module: nn.Module, args: tuple[ModuleValue, ...], kwargs: dict[str, ModuleValue]) -> _Inputs | None:
        """Returns the edited input, None if unchanged."""
        edited = edit(args[0] if args else kwargs["hidden_states"])
        if edited is None:
            return None
        return ((edited, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": edited})

    return module.register_forward_pre_hook(on_input, with_kwargs=True)


def listen(place: Place, listener: Callable[[Tensor], object]) -> RemovableHandle:
    """Registers a hook that calls `listener` with a module's input or output; the hook changes no values."""

    def keep(value: Tensor) -> None:
        """Calls the listener, and ignores what it returns."""
        listener(value)

    return change(place, keep)
