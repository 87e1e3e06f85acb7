"""Makes a torch without CUDA take tensors on cuda devices: its device guard, its hooks, and answers of `torch.cuda`.

C++ asks for a device guard when it indexes, and for an accelerator in a backward pass. A torch that was built without
CUDA has neither, so both get a table of C++ methods that says yes. Tried with torch 2.13.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from cacheprobe.core import devices
from tests.device.captured import CudaGraph
from tests.device.counts import Gpu

NUM_DEVICES = 2
_CUDA = 1  # of c10::DeviceType
_NUM_METHODS = 40
"""Entries of a table of C++ methods that are copied: all of a guard's, and of the hooks' those before the last few."""

_IS_BUILT, _HAS_CONTEXT = 2, 4
"""Numbers of two methods of torch's CUDA hooks."""

_Methods = ctypes.c_void_p * _NUM_METHODS
_kept: list[object] = []
"""What C++ points to, for as long as the process lives."""


def _answering(answer: Callable[[], int]) -> int:
    """Returns the address of a C function that returns `answer()`, whatever it is given."""
    function = ctypes.CFUNCTYPE(ctypes.c_int)(answer)
    _kept.append(function)
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _instance(methods: Any) -> int:
    """Returns the address of a C++ object without fields that has these methods."""
    instance = (ctypes.c_void_p * 1)(ctypes.addressof(methods))
    _kept.extend((methods, instance))
    return ctypes.addressof(instance)


def _library(name: str) -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))


@cache
def set_guard() -> None:
    """Gives the process a device guard for CUDA that does nothing and counts NUM_DEVICES devices.

    It stays: autograd counts devices in the first backward of a process, and starts a thread for each.
    torch's own function replaces a guard that counts no devices by one that does nothing; so torch is given such a
    guard first, and the one method that it calls is the one that counts.
    """
    guards = (ctypes.c_void_p * 2).in_dll(_library("libc10.so"), "_ZN3c104impl26device_guard_impl_registryE")
    assert not guards[_CUDA], "this torch has a CUDA guard of its own"
    called: list[int] = []
    noting = _Methods(*[_answering(lambda i=i: called.append(i) or 0) for i in range(_NUM_METHODS)])
    guards[_CUDA] = _instance(noting)
    torch._C._ensureCUDADeviceGuardSet()
    (counts,) = called
    idle = _Methods.from_address(ctypes.c_void_p.from_address(guards[_CUDA]).value or 0)
    methods = _Methods(*idle)
    methods[counts] = _answering(lambda: NUM_DEVICES)
    guards[_CUDA] = _instance(methods)


@contextmanager
def _an_accelerator() -> Iterator[None]:
    """Lets C++ find CUDA inside the `with`: the methods that say so, `isBuilt` and `hasPrimaryContext`, say yes."""
    library = _library("libtorch_cpu.so")
    library._ZN2at6detail12getCUDAHooksEv.restype = ctypes.c_void_p
    table = ctypes.c_void_p.from_address(library._ZN2at6detail12getCUDAHooksEv())
    before = table.value
    methods = _Methods.from_buffer_copy(_Methods.from_address(before or 0))
    for number in (_IS_BUILT, _HAS_CONTEXT):
        methods[number] = _answering(lambda: 1)
    _kept.append(methods)
    table.value = ctypes.addressof(methods)
    try:
        assert torch._C._accelerator_getAccelerator().type == "cuda", "this torch orders its hooks otherwise"
        yield
    finally:
        table.value = before


class Event(torch.cuda.Stream):
    """Stands for an event, and for the one stream."""

    def __new__(cls, gpu: Gpu, **_: object) -> "Event":
        return object.__new__(cls)

    def __init__(self, gpu: Gpu, **_: object) -> None:
        self._gpu, self._number = gpu, gpu.num_begun

    def record(self, *_: object) -> None:
        """Takes the place after all that has begun."""
        self._number = self._gpu.num_begun

    def record_event(self, *_: object) -> "Event":
        return Event(self._gpu)

    def wait(self, *_: object) -> None:
        """Makes a stream wait, not the host."""

    wait_event = wait_stream = wait

    def synchronize(self) -> None:
        """Lets the host wait until the copies before it have arrived."""
        self._gpu.waited("synchronize")
        self._gpu.arrive(self._number)


@contextmanager
def answering_cuda(gpu: Gpu, num_devices: int, capability: tuple[int, int], num_bytes: int) -> Iterator[None]:
    """Makes `torch.cuda` speak of `num_devices` GPUs inside the `with`. gpu: counts, and holds copies."""
    name = "Pretend GPU"
    facts = SimpleNamespace(
        name=name, major=capability[0], minor=capability[1], total_memory=num_bytes, multi_processor_count=132
    )
    event = lambda *_, **__: Event(gpu)  # noqa: E731
    answers: dict[str, Any] = {
        "_lazy_init": lambda: None, "is_available": lambda: True, "is_initialized": lambda: True,
        "device_count": lambda: num_devices, "current_device": lambda: 0, "set_device": lambda *_: None,
        "get_device_name": lambda *_: name, "get_device_capability": lambda *_: capability,
        "get_device_properties": lambda *_: facts, "mem_get_info": lambda *_: (num_bytes, num_bytes),
        "memory_reserved": lambda *_: 0, "memory_allocated": lambda *_: 0, "empty_cache": lambda: None,
        "synchronize": lambda *_: Event(gpu).synchronize(), "is_bf16_supported": lambda *_, **__: True,
        "Event": event, "Stream": event, "current_stream": event, "stream": nullcontext, "device": nullcontext,
        "CUDAGraph": lambda: CudaGraph(gpu), "graph": lambda captured, *_, **__: captured.capturing(),
    }  # fmt: skip
    with ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(torch.cuda, **answers))
        stack.enter_context(mock.patch.dict(devices._streams, clear=True))  # of another pretend GPU
        stack.enter_context(mock.patch.object(torch.Tensor, "pin_memory", lambda tensor, *_: tensor))
        stack.enter_context(_an_accelerator())
        yield
