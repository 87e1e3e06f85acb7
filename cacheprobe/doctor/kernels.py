"""Reports for which operations `ops.dispatch` takes a kernel on this machine, and that runs take none."""

import torch

from cacheprobe.doctor.findings import Finding
from cacheprobe.ops.dispatch import KERNEL, paths


def kernels() -> list[Finding]:
    """Returns a finding on runs, and one for each operation, or one for all if they share a reason.

    On a GPU it compiles the kernels.
    """
    runs = Finding("runs", "use none of them, on any device; programs call them through cacheprobe.ops.dispatch")
    found = paths("cuda" if torch.cuda.is_available() else "cpu")
    said_of = {name: f"{path.runs}: {path.reason}" for name, path in found.items()}
    if len(set(said_of.values())) == 1:
        return [runs, Finding(f"all {len(said_of)}", next(iter(said_of.values())))]
    own = [
        Finding(name, said, found[name].runs == KERNEL, "the reference runs instead") for name, said in said_of.items()
    ]
    return [runs, *own]
