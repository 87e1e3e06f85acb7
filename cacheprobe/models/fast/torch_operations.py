"""Computes an operation of torch again, into the memory of its first result, and refuses those of which this would be
wrong. Replaces the forward of a module for a time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from cacheprobe.core.live import ModuleValue
from cacheprobe.ops.compiled.queue import Queue
from cacheprobe.ops.compiled.queue_loops import COPY, MINUS, SUM, TIMES

aten = torch.ops.aten
MAPPED: Mapping[OpOverload, int] = {
    aten.add.Tensor: SUM, aten.mul.Tensor: TIMES, aten.neg.default: MINUS, aten.clone.default: COPY,
    aten.cat.default: COPY,
}  # fmt: skip
"""Operations of torch -> those of `Queue.mapped`."""
_UNKNOWN_BEFORE = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output, torch.Tag.nondeterministic_seeded}
"""Operations with such a tag give another shape, number or draw in every pass."""
_COPIES = {"reshape", "flatten", "contiguous"}
"""Operations that copy a tensor if no view of it will do."""


class NotTapedError(Exception):
    """Is raised while a pass is recorded, if later passes cannot compute the same operations."""


def require_known_before(func: OpOverload) -> None:
    """Raises: NotTapedError for an operation whose result depends on values in more than its numbers."""
    if _UNKNOWN_BEFORE & {*func.tags}:
        raise NotTapedError(f"{func} depends on values")


def is_map(queue: Queue, func: OpOverload, args: Sequence[ModuleValue]) -> bool:
    """Returns True if a queue's MAPs compute an operation of torch: a sum, product, negative or copy of tensors in the
    queue's dtype."""
    read: Sequence[ModuleValue] = args if func in MAPPED else ()
    if func is aten.cat.default:
        read = args[0]
    elif func.is_view and func.overloadpacket.__name__ in _COPIES:
        read = args[:1]
    dims = [one.dim() for one in read if isinstance(one, Tensor) and one.dtype == queue.dtype]
    return 0 < len(read) == len(dims) and all(0 < dim <= 4 for dim in dims)


def queue_map(queue: Queue, func: OpOverload, args: Sequence[ModuleValue]) -> Tensor:
    """Queues an operation that `is_map`; returns its result, of torch's layout in memory, which holds no values yet."""
    out: Tensor = func(*args)  # of numbers that are not computed yet
    if func is aten.cat.default:
        start, dim = 0, args[1] if len(args) > 1 else 0
        for part in args[0]:
            queue.mapped(COPY, part, part, out.narrow(dim, start, part.shape[dim]))
            start += part.shape[dim]
    elif func in MAPPED:
        queue.mapped(MAPPED[func], args[0], args[-1], out)
    else:
        queue.mapped(COPY, args[0], args[0], out.view(args[0].shape))
    return out


def again(
    func: OpOverload, args: Sequence[ModuleValue], kwargs: Mapping[str, ModuleValue], out: ModuleValue
) -> Callable[[], object]:
    """Returns a function that computes an operation of torch again, into the memory of its first result. Raises:
    NotTapedError if the result is no tensor."""
    if not all(isinstance(one, Tensor) for one in tree_leaves(out)):
        raise NotTapedError(f"{func} depends on values")
    if func._schema.is_mutable:
        return partial(func, *args, **kwargs)
    names = [(one.name, str(one.type)) for one in func._schema.arguments]
    # other operations may choose another library for `out=`, with other bits
    for overload in func.overloadpacket.overloads() if torch.Tag.pointwise in func.tags else ():
        other = getattr(func.overloadpacket, overload)
        taken = [(one.name, str(one.type)) for one in other._schema.arguments if not one.is_out]
        if isinstance(out, Tensor) and other._schema.is_mutable and taken == names and _writes_out(other):
            return partial(other, *args, **kwargs, out=out)

    def compute() -> None:
        """Copies new results to the memory of the first ones."""
        for kept, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
            kept.copy_(new)

    return compute


def share_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _writes_out(func: OpOverload) -> bool:
    """Returns True if an operation of torch writes its one result to the argument `out`."""
    return [one.name for one in func._schema.arguments if one.is_out] == ["out"]


def tensors_in(args: tuple[ModuleValue, ...], kwargs: Mapping[str, ModuleValue]) -> list[Tensor]:
    """Returns the tensors among the arguments of a block, with the residual stream first."""
    return [one for one in tree_leaves((args, dict(kwargs))) if isinstance(one, Tensor)]


@contextmanager
def replaced(module: nn.Module, forward: Callable[..., ModuleValue]) -> Iterator[None]:
    """Makes a module compute by `forward` inside the `with`."""
    own = vars(module)
    before = own.get("forward")
    own["forward"] = forward
    try:
        yield
    finally:
        del own["forward"]
        if before is not None:
            own["forward"] = before
