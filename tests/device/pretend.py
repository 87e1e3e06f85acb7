"""Stands for one or two GPUs: tensors that say cuda:0 or cuda:1, and are computed on the CPU with the CPU's bits.

    with pretending() as gpu:
        with gpu.in_phase("verify"):
            (torch.ones(2, device="cuda") * 3).sum().item()
        gpu.waits_by_phase()  # {"verify": 1}
        torch.ones(2, device="cuda") + torch.ones(2)  # RuntimeError, as on a GPU

Each tensor is a `GpuTensor` around the CPU tensor that holds its numbers. torch sees a CUDA device, so that it refuses
itself what it refuses there. Each operation reaches `__torch_dispatch__`, which refuses tensors of two devices, counts
waits and launches, and computes with the held tensors; views and writes alias as these do.

A `non_blocking` copy to the host arrives when the host waits for an event after it; until then the host reads NaN.
A CUDA graph records what is launched while it is captured: `captured.CudaGraph`.

Not seen: bits of CUDA kernels, streams, memory, Triton's
compiler, and shapes or dtypes that only CUDA refuses. `.resize_()` and its like are not followed. After the `with` all
is undone but the idle guard of `driver.set_guard`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from tests.device.counts import Gpu, place
from tests.device.driver import NUM_DEVICES, answering_cuda, set_guard

if not torch.backends.cuda.is_built():
    set_guard()  # when pytest collects, before a test runs a backward pass

aten = torch.ops.aten
_BEYOND = 1 << 62
"""Is added to addresses, so that whatever reads there on the host fails at once."""
_HOST_CODE = "cacheprobe/ops/compiled/"
"""Files that read addresses on the host."""
_COPIES = {"copy_", "_to_copy"}
_INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
_READ_BY_HOST = {
    "_local_scalar_dense": "item", "nonzero": "nonzero", "equal": "equal", "masked_select": "masked_select",
    "_unique2": "unique", "unique_dim": "unique", "unique_consecutive": "unique", "bincount": "bincount",
    "_linalg_check_errors": "linalg", "_linalg_eigh": "linalg", "_linalg_svd": "linalg", "linalg_lstsq": "linalg",
}  # fmt: skip
"""Operations whose result, or its size, the host reads -> kind of wait."""
_WHOLE_ONLY = {"cat", "embedding", "gather", "index_select", "masked_select", "scatter", "searchsorted", "take"}
"""Operations that take no CPU tensor, not even a single number."""
_RESHAPING = {"resize_", "set_", "t_", "transpose_", "squeeze_", "unsqueeze_", "as_strided_"}
_NO_LAUNCH = {"_local_scalar_dense", "detach", "empty", "empty_like", "empty_strided", "new_empty"}

_gpu = Gpu()


class GpuTensor(Tensor):
    """Says that it is on a cuda device; `held` is the CPU tensor with its numbers."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor, device: torch.device | None = None, requires_grad: bool = False) -> Any:
        if device is None:  # as accelerate makes a parameter anew, of the class of the old one
            return torch.nn.Parameter(held, requires_grad)
        with torch.inference_mode(held.is_inference()):  # a view is of the kind of its base
            made = Tensor._make_wrapper_subclass(
                cls, held.shape, held.stride(), held.storage_offset(), dtype=held.dtype, device=device
            )
        made.held = held
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:  # C++ chooses its kernel by device
            given = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
            if not (torch.is_grad_enabled() and any(one.requires_grad for one in given)):
                return _compute(func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_composite(func):  # in inference mode these arrive whole
            return func.decompose(*args, **(kwargs or {}))
        return _compute(func, args, kwargs or {})

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if force:
            return self.detach().cpu().numpy()
        raise _gpu.refusal(TypeError, f"can't convert {self.device} device type tensor to numpy; use Tensor.cpu()")

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.numpy()

    def __dlpack__(self, **_: Any) -> Any:
        raise _gpu.refusal(BufferError, f"memory of {self.device} is not the host's")

    def data_ptr(self) -> int:
        if _HOST_CODE in place():
            raise _gpu.refusal(RuntimeError, f"a compiled loop reads an address of {self.device} on the host")
        return self.held.data_ptr() + _BEYOND

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.held.untyped_storage()

    def record_stream(self, *_: object) -> None:
        """Memory is freed when nothing refers to it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copied = GpuTensor(self.held.clone(), self.device)
            is_parameter = isinstance(self, torch.nn.Parameter)
            memo[id(self)] = torch.nn.Parameter(copied, False) if is_parameter else copied
            memo[id(self)].requires_grad_(self.requires_grad)
        return memo[id(self)]

    def __repr__(self, **_: Any) -> str:
        return f"GpuTensor({self.held!r}, device={self.device})"


@cache
def _is_composite(func: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def mapped(change: Callable[[Tensor], Any], value: Any) -> Any:
    """Returns `value` with each tensor in it, also inside of lists and tuples, replaced by `change(tensor)`."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        parts = [mapped(change, one) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def held(value: Any) -> Any:
    """Returns `value` with the CPU tensors that its GpuTensors hold."""
    return mapped(lambda one: one.held if isinstance(one, GpuTensor) else one, value)


def on_gpu(value: Any, device: torch.device) -> Any:
    """Returns `value` with each of its CPU tensors on `device`: around the same memory."""
    return mapped(lambda one: one if isinstance(one, GpuTensor) else GpuTensor(one, device), value)


def _compute(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns the result of an operation, on the device where a GPU would have it."""
    name = getattr(func, "_opname", func.__name__)
    given: list[tuple[int, Tensor]] = []
    for number, value in (*enumerate(args), *((-1, value) for value in kwargs.values())):
        mapped(lambda one, number=number: given.append((number, one)), value)
    wrappers = {id(one.held): one for _, one in given if isinstance(one, GpuTensor)}
    if name in _RESHAPING:
        raise NotImplementedError(f"the pretend GPU does not follow {name}")
    if name not in _COPIES:
        _refuse_mixture(func, name, given)
    asked = kwargs.get("device")
    device = _numbered(asked) if asked is not None else next(iter(wrappers.values())).device
    _count(func, name, args, kwargs, device)
    kwargs = {key: torch.device("cpu") if key == "device" else held(value) for key, value in kwargs.items()}
    if name == "copy_" and device.type != "cpu" and args[0].device.type == "cpu" and _is_later(name, args, kwargs):
        _gpu.begin_copy(args[0], held(args[1]))
        return args[0]
    result = launch(partial(_on_cpu, func, name, held(args), kwargs), held([one for _, one in given]))
    if name == "copy_":
        return args[0]
    if device.type == "cpu":
        return result
    return mapped(lambda one: wrappers.get(id(one)) if id(one) in wrappers else GpuTensor(one, device), result)


def _on_cpu(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Returns the result of an operation on CPU tensors, also for dtypes that only CUDA's kernels take."""
    if name in ("_softmax", "_log_softmax") and args[2]:  # rounds its input to float32 itself
        return func(args[0].float(), args[1], False)
    if name == "histc" and not args[0].is_floating_point():
        return func(args[0].float(), *args[1:], **kwargs).to(args[0].dtype)
    return func(*args, **kwargs)


def launch(compute: Callable[[], Any], given: list[Tensor]) -> Any:
    """Returns what `compute` returns, which is recorded while a graph is captured. given: the CPU tensors that it reads
    and writes."""
    return compute() if _gpu.graph is None else _gpu.graph.record(compute, given)


def _refuse_mixture(func: Any, name: str, given: list[tuple[int, Tensor]]) -> None:
    """Raises: RuntimeError, as torch on a GPU, if an operation has tensors on several devices where it takes none."""
    first = next(one.device for _, one in given if isinstance(one, GpuTensor))
    for number, one in given:
        if one.device == first:
            continue
        is_host = one.device.type == "cpu"
        is_written = number == 0 and name.endswith("_") and not name.endswith("__")
        if is_host and one.dim() == 0 and not is_written and name not in _WHOLE_ONLY:
            continue  # a number
        if is_host and func in _INDEXED and number == 1 and isinstance(given[0][1], GpuTensor):
            continue  # indices are uploaded
        raise _gpu.refusal(
            RuntimeError,
            f"Expected all tensors to be on the same device, but found at least two devices, {first} and {one.device}! "
            f"(argument {number} of {name}, {tuple(one.shape)})",
        )


def _count(func: Any, name: str, args: Any, kwargs: Any, device: torch.device) -> None:
    """Counts the waits and the launch of an operation."""
    if name in _COPIES:
        is_later = _is_later(name, args, kwargs)
        target = args[0].device if name == "copy_" else device
        source = args[1].device if name == "copy_" else args[0].device
        if is_later and "cpu" in (target.type, source.type):
            _gpu.require_no_capture("a copy between host and device")  # whose address a graph would hold
        elif "cpu" in (target.type, source.type):
            _gpu.waited("download" if target.type == "cpu" else "upload")
    elif name in _READ_BY_HOST:
        _gpu.waited(_READ_BY_HOST[name])
    elif name == "repeat_interleave" and isinstance(args[0], Tensor) and kwargs.get("output_size") is None:
        _gpu.waited("repeat_interleave")
    elif func in _INDEXED:
        indices = [one for one in args[1] if one is not None]
        is_fill = len(args) > 2 and args[2].numel() == 1 and len(indices) == 1  # computed by masked_fill_
        if any(one.dtype in (torch.bool, torch.uint8) for one in indices) and not is_fill:
            _gpu.waited("mask")
        for _ in (one for one in indices if not isinstance(one, GpuTensor)):
            _gpu.waited("upload")
    if not getattr(func, "is_view", False) and name not in _NO_LAUNCH:
        _gpu.launched(name)


def _is_later(name: str, args: Any, kwargs: Any) -> bool:
    """Returns True for a copy that the host does not wait for."""
    return bool(kwargs.get("non_blocking", name == "copy_" and len(args) > 2 and args[2]))


def _numbered(device: Any) -> torch.device:
    """Returns a device with its number; "cuda" is the first."""
    device = torch.device(device)
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def _register_factories(library: torch.library.Library) -> None:
    """Makes each operation that takes a device and no tensor, such as `arange`, give a GpuTensor; and `copy_`, which
    `torch.tensor` calls while `__torch_dispatch__` is switched off."""
    library.impl("copy_", lambda *args, **kwargs: _compute(aten.copy_.default, args, kwargs), "CUDA")
    for schema in torch._C._jit_get_all_schemas():
        takes = {argument.name: str(argument.type) for argument in schema.arguments}
        if not schema.name.startswith("aten::") or "device" not in takes or "Tensor" in " ".join(takes.values()):
            continue
        func = getattr(getattr(aten, schema.name[6:], None), schema.overload_name or "default", None)
        if func is None or not torch._C._dispatch_has_kernel(func.name()) or _is_composite(func):
            continue

        def made(*args: Any, func: Any = func, **kwargs: Any) -> Any:
            device = _numbered(kwargs["device"])
            if kwargs.get("generator") is not None:  # a torch without CUDA can make none for a GPU
                raise _gpu.refusal(RuntimeError, "Expected a 'cuda' device type for generator but found 'cpu'")
            if func._opname not in _NO_LAUNCH:
                _gpu.launched(func._opname)
            plain = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory")}
            return GpuTensor(launch(partial(func, *args, **plain, device="cpu"), []), device)

        library.impl(func, made, "CUDA")


@contextmanager
def pretending(num_devices: int = 1, capability: tuple[int, int] = (9, 0), num_bytes: int = 80 << 30) -> Iterator[Gpu]:
    """Makes torch find `num_devices` GPUs inside the `with`; yields a Gpu, which counts. num_bytes: memory of each.

    Raises: RuntimeError on a machine with a GPU, or if torch was built for CUDA.
    """
    global _gpu
    if torch.backends.cuda.is_built() or torch.cuda.is_available():
        raise RuntimeError("this torch has CUDA; a pretend GPU would hide it")
    assert num_devices <= NUM_DEVICES
    _gpu = gpu = Gpu()
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    library = torch.library.Library("aten", "IMPL")
    try:
        _register_factories(library)
        torch.__future__.set_swap_module_params_on_conversion(True)  # so that Module.to keeps shared weights shared
        with answering_cuda(gpu, num_devices, capability, num_bytes):
            yield gpu
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)
        library._destroy()
