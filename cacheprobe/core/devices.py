"""Moves tensors between the host and a GPU in copies for which the host does not wait."""

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(device: torch.device, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns int64 tensors on `device`, in one copy. On the CPU they are the given ones."""
    if device.type == "cpu":
        return list(tensors)
    return parts_of(joined(tensors).pin_memory().to(device, non_blocking=True), tensors)


def joined(tensors: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """Returns the numbers of all tensors, one after another, each from an even place on: kernels are compiled for
    addresses that are multiples of 16 bytes. out: memory for them."""
    odd = tensors[0].new_zeros(1)
    parts = (part for one in tensors for part in (one.reshape(-1), odd[: one.numel() % 2]))
    return torch.cat(list(parts), out=out)


def parts_of(numbers: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Returns views of what `joined` returned that have the shapes of the tensors in `like`."""
    parts = numbers.split([one.numel() + one.numel() % 2 for one in like])
    return [part[: one.numel()].view(one.shape) for part, one in zip(parts, like, strict=True)]


class Download:
    """Tensors on their way to the host, in copies that run beside the computation. `tensors` waits for them."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Begins to copy tensors as they are after all that was launched so far. Those on the CPU are not copied."""
        self._held = list(tensors)
        devices = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
        self._events: list[torch.cuda.Event | torch.Event] = []
        for device in devices:
            beside = _stream_beside(device)
            beside.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(beside):
                for number, tensor in enumerate(tensors):
                    if tensor.device == device:
                        self._held[number] = _pinned(tensor)
                        self._held[number].copy_(tensor, non_blocking=True)
                        tensor.record_stream(beside)  # nobody gets its memory before the copy has ended
            self._events.append(beside.record_event())

    def tensors(self) -> list[Tensor]:
        """Returns the tensors on the host. Call it once."""
        for event in self._events:
            event.synchronize()
        return [one.clone() if one.is_pinned() else one for one in self._held]  # pinned memory is used again


def _pinned(like: Tensor) -> Tensor:
    """Returns new memory of the host for a copy: pinned, or without such memory any, to which copies wait."""
    try:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
    except RuntimeError:
        return torch.empty(like.shape, dtype=like.dtype)


_CPU_REFUSAL = "can't allocate memory"
"""Text of the RuntimeError that torch raises if the CPU's memory is used up; this error has no class of its own."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Returns whether an error says that Python, a GPU, or torch on the CPU could not allocate memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _CPU_REFUSAL in str(error)


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    """Returns the stream of a device that copies states while the next pass is computed."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]
