"""Finds a module's tensor by its name in a transformers model, and hooks it: one of the module's outputs or inputs."""

import re
from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle

from cacheprobe.core.live import ModuleValue
from cacheprobe.core.values import hint
from cacheprobe.models.base import ModelError
from cacheprobe.models.hf.attention import QUERY

TensorEdit = Callable[[Tensor], Tensor | None]
"""Function of a module's tensor that returns a tensor in its place, or None to leave it unchanged."""

OUTPUT, INPUT = "output", "input"
_ENDING = re.compile(rf"(.+?)\.({OUTPUT}|{INPUT}|{QUERY})(?:\.(\d{{1,2}}))?")


class TensorPlace(NamedTuple):
    """Holds the path of a module, the side of it at which a tensor is, and the tensor's number among those there."""

    path: str
    side: str
    """OUTPUT, INPUT, or QUERY: the queries that an attention gives to the attention function, after the rotation."""
    number: int


def find_tensor(model: nn.Module, name: str, of: str) -> TensorPlace:
    """Returns the place of a tensor, from its name as `core.hook_names.module_name` gives it. of: the model's name, for
    errors. Raises: ModelError for a module that the model lacks."""
    paths = [path for path, module in model.named_modules() if path and not isinstance(module, nn.ModuleList)]
    ending = _ENDING.fullmatch(name)
    if name in paths:  # also a module that is itself named "output"
        return TensorPlace(name, OUTPUT, 0)
    if ending is not None and ending[1] in paths:
        return TensorPlace(ending[1], ending[2], int(ending[3] or 0))
    asked = ending[1] if ending else name
    raise ModelError(f"{of} has no module {asked}{hint(asked, paths)}; its names are those of named_modules()")


def hook_tensor(module: nn.Module, place: TensorPlace, edit: TensorEdit) -> RemovableHandle:
    """Registers a PyTorch hook: `edit` gets the tensor at the place, whose side is not QUERY, and a tensor that `edit`
    returns replaces it. Returns the handle that removes the hook."""

    def edited(value: ModuleValue) -> ModuleValue:
        """Returns the value, which may hold several tensors, with one of them edited; None if `edit` returned None."""
        leaves, shape = tree_flatten(value)
        tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        if place.number >= len(tensors):
            raise ModelError(f"{place.path} has {len(tensors)} tensors as its {place.side}, and no [{place.number}]")
        new = edit(leaves[at := tensors[place.number]])
        return None if new is None else tree_unflatten([*leaves[:at], new, *leaves[at + 1 :]], shape)

    if place.side == INPUT:
        return module.register_forward_pre_hook(lambda _, args, kwargs: edited((args, kwargs)), with_kwargs=True)
    return module.register_forward_hook(lambda _, args, output: edited(output))


class TokenRows:
    """Shows the tensors of modules token by token. Base class of BaseLM."""

    token_shape: tuple[int, int] = (0, 0)
    """(batch size, tokens) of the present forward; (0, 0) outside of one."""

    @cached_property
    def _token_axes(self) -> dict[str, int]:
        """By name of a hooked module or hook point: the axis of its tensor with an entry for each token, 0 for one of b
        * t entries."""
        return {}

    def edit_tokens(self, name: str, edit: TensorEdit, value: Tensor) -> Tensor | None:
        """Calls `edit` with the tensor of a module as [b, t, ...]; the tensor itself may be [b, h, t, ...] or [b * t,
        ...]. Does nothing outside of a forward, as when a lens reads through the last norm. Raises: ModelError for a
        tensor without an entry for each token, of which there are no rows."""
        b, t = self.token_shape
        if not b:
            return None
        known, shape = self._token_axes.get(name), value.shape
        fitting = [axis for axis in (1, 2) if value.dim() > axis + 1 and shape[0] == b and shape[axis] == t]
        fitting += [0] if value.dim() > 1 and shape[0] == b * t else []
        if not fitting or (known is not None and known not in fitting):
            raise ModelError(
                f"{name} is {list(shape)} in a pass of {b} x {t} tokens: it has no entry for each token, so no rows; "
                "name another module, or another of its tensors, as in lm_head.output[1]"
            )
        axis = self._token_axes.setdefault(name, fitting[0])
        if axis:
            new = edit(value.transpose(1, axis))
            return None if new is None else new.transpose(1, axis)
        new = edit(value.unflatten(0, (b, t)))
        return None if new is None else new.flatten(0, 1)
