"""Checks, before loading, the device of a model's weights: one device, or a map from the model's parts to devices."""

from collections.abc import Mapping

import torch

from cacheprobe.models.base import ModelError

KINDS = ("cpu", "cuda")
PLANS = ("auto", "balanced", "balanced_low_0", "sequential")
"""Names of device maps that transformers computes itself."""

Device = str | int | torch.device
DeviceMap = Mapping[str, Device] | str


def checked_device(device: Device) -> torch.device:
    """Returns `device` as a torch.device. Raises: ModelError for any device but the CPU and the CUDA GPUs that torch
    finds on this machine."""
    try:
        checked = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ModelError(f"unknown device {device!r}; give cpu, cuda or cuda:NUMBER") from error
    if checked.type not in KINDS:
        raise ModelError(f"device {str(checked)!r} is not supported; cacheprobe runs on {' and '.join(KINDS)}")
    if checked.type == "cuda":
        if not torch.cuda.is_available():
            raise ModelError(
                f"device {str(checked)!r} was asked for, and torch {torch.__version__} finds no CUDA GPU here; install "
                "a CUDA build of torch on a machine with one, or use device='cpu'"
            )
        if (checked.index or 0) >= (count := torch.cuda.device_count()):
            raise ModelError(f"device {str(checked)!r} was asked for; there are cuda:0 to {count - 1}")
    return checked


def placement(device: Device | None, device_map: "DeviceMap | None", adapter: object = None) -> "DeviceMap | None":
    """Returns the `device_map` argument for transformers' from_pretrained: a dict (part of the model -> device), or the
    name of a plan such as "auto"; None if no map is given and the device is the CPU.

    Raises: ModelError if both `device` and `device_map` are given, or both `device_map` and `adapter`; for an unknown
    plan, an absent device, and weights left on the disk.
    """
    if device is not None and device_map is not None:
        raise ModelError("give device= or device_map=, not both")
    if device_map is None:
        own_device = checked_device(device) if device is not None else torch.device("cpu")
        return None if own_device.type == "cpu" else {"": str(own_device)}
    if adapter is not None:
        raise ModelError("an adapter is merged on one device; merge it with peft first, or give device=")
    if isinstance(device_map, str):
        if device_map in PLANS:
            return device_map
        raise ModelError(f"unknown device_map {device_map!r}; give one of {', '.join(PLANS)}, or a dict by module")
    if not isinstance(device_map, Mapping) or not device_map:
        raise ModelError(f"device_map is {device_map!r:.60}; give a dict such as {{'': 'cuda:0'}}, or 'auto'")
    for part, target in device_map.items():
        if target == "disk":
            raise ModelError(f"device_map leaves {part or 'the model'} on the disk, where hooks find no weights")
    numbered = {part: f"cuda:{target}" if type(target) is int else target for part, target in device_map.items()}
    return {part: str(checked_device(target)) for part, target in numbered.items()}


def require_placed(model: torch.nn.Module, name: str) -> None:
    """Checks that transformers loaded every weight of a model. Raises: ModelError if memory did not suffice, so that
    weights were left on the disk (torch's "meta" device)."""
    if away := [path for path, weight in model.named_parameters() if weight.device.type == "meta"]:
        raise ModelError(
            f"{name}: there was no room for {len(away)} weights, such as {away[0]}, which were left on the disk; use "
            "more or larger devices, or another dtype"
        )
