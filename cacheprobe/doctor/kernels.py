"""Which operations run as kernels on this machine, and why the others do not."""

import torch

from cacheprobe.doctor.findings import Finding
from cacheprobe.ops.dispatch import KERNEL, paths


def kernels() -> list[Finding]:
    """A line for each operation; one for all where all have the same reason. On a GPU it compiles them."""
    found = paths("cuda" if torch.cuda.is_available() else "cpu")
    told = {name: f"{path.runs}: {path.reason}" for name, path in found.items()}
    if len(set(told.values())) == 1:
        return [Finding(f"all {len(told)}", next(iter(told.values())))]
    return [
        Finding(name, said, found[name].runs == KERNEL, "the reference runs instead") for name, said in told.items()
    ]
