"""Checks where a model's weights go, before loading: one device, or a map of the model's parts over several devices."""

from collections.abc import Mapping

import torch

from cacheprobe.models.base import ModelError

KINDS = ("cpu", "cuda")
PLANS = ("auto", "balanced", "balanced_low_0", "sequential")
"""Device maps that transformers computes itself."""

Device = str | int | torch.device
DeviceMap = Mapping[str, Device] | str


def checked_device(device: Device) -> torch.device:
    """Returns the device as torch.device. Raises: ModelError for an unsupported kind of device, and for a GPU that is
    absent."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ModelError(f"unknown device {device!r}; give cpu, cuda or cuda:NUMBER") from error
    if found.type not in KINDS:
        raise ModelError(f"device {str(found)!r} is not supported; cacheprobe runs on {' and '.join(KINDS)}")
    if found.type == "cuda":
        if not torch.cuda.is_available():
            raise ModelError(
                f"device {str(found)!r} was asked for, and torch {torch.__version__} finds no CUDA GPU here; install "
                "a CUDA build of torch on a machine with one, or use device='cpu'"
            )
        if (found.index or 0) >= (count := torch.cuda.device_count()):
            raise ModelError(f"device {str(found)!r} was asked for; there are cuda:0 to {count - 1}")
    return found


def placement(device: Device | None, device_map: "DeviceMap | None", adapter: object = None) -> "DeviceMap | None":
    """Returns the `device_map` to pass to transformers; None if the weights stay on the CPU.

    Raises: ModelError if both `device` and `device_map` are given, for an absent device, for weights left on the disk,
    and for an adapter that would have to be merged into a model split over devices.
    """
    if device is not None and device_map is not None:
        raise ModelError("give device= or device_map=, not both")
    if device_map is None:
        found = checked_device(device) if device is not None else torch.device("cpu")
        return None if found.type == "cpu" else {"": str(found)}
    if adapter is not None:
        raise ModelError("an adapter is merged on one device; merge it with peft first, or give device=")
    if isinstance(device_map, str):
        if device_map in PLANS:
            return device_map
        raise ModelError(f"unknown device_map {device_map!r}; give one of {', '.join(PLANS)}, or a dict by module")
    if not isinstance(device_map, Mapping) or not device_map:
        raise ModelError(f"device_map is {device_map!r:.60}; give a dict such as {{'': 'cuda:0'}}, or 'auto'")
    for part, where in device_map.items():
        if where == "disk":
            raise ModelError(f"device_map leaves {part or 'the model'} on the disk, where hooks find no weights")
    numbered = {part: f"cuda:{where}" if type(where) is int else where for part, where in device_map.items()}
    return {part: str(checked_device(where)) for part, where in numbered.items()}


def require_placed(model: torch.nn.Module, name: str) -> None:
    """Raises: ModelError if some weights of a model are on no device: transformers left them on the disk for lack of
    memory."""
    if away := [path for path, weight in model.named_parameters() if weight.device.type == "meta"]:
        raise ModelError(
            f"{name}: there was no room for {len(away)} weights, such as {away[0]}, which were left on the disk; use "
            "more or larger devices, or another dtype"
        )
