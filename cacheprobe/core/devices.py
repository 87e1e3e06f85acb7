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
    """Returns the numbers of all tensors, one after another. out: memory for them."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors], out=out)


def parts_of(numbers: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Returns views of `numbers` that have the shapes of the tensors in `like`, one after another."""
    parts = numbers.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


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
                        self._held[number] = torch.empty(tensor.shape, dtype=tensor.dtype).pin_memory()
                        self._held[number].copy_(tensor, non_blocking=True)
                        tensor.record_stream(beside)  # nobody gets its memory before the copy has ended
            self._events.append(beside.record_event())

    def tensors(self) -> list[Tensor]:
        """Returns the tensors on the host. Call it once."""
        for event in self._events:
            event.synchronize()
        return [one.clone() if one.is_pinned() else one for one in self._held]  # pinned memory is used again


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    """Returns the stream of a device that copies states while the next pass is computed."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]
