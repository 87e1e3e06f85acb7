"""Reports which operations run as kernels on this machine, and why the others do not."""

import torch

from cacheprobe.doctor.findings import Finding
from cacheprobe.ops.dispatch import KERNEL, paths


def kernels() -> list[Finding]:
    """Returns a finding for each operation, or one for all if they share a reason. On a GPU it compiles the kernels."""
    found = paths("cuda" if torch.cuda.is_available() else "cpu")
    said_of = {name: f"{path.runs}: {path.reason}" for name, path in found.items()}
    if len(set(said_of.values())) == 1:
        return [Finding(f"all {len(said_of)}", next(iter(said_of.values())))]
    return [
        Finding(name, said, found[name].runs == KERNEL, "the reference runs instead") for name, said in said_of.items()
    ]
