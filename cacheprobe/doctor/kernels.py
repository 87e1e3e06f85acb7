"""Reports which operations of `ops.dispatch` have a usable Triton kernel on this machine. `cp.run` uses no kernel."""

import torch

from cacheprobe.doctor.findings import Finding
from cacheprobe.ops.dispatch import KERNEL, paths


def kernels() -> list[Finding]:
    """Returns a list of findings on the Triton kernels. The first says that `cp.run` uses no kernel; the others give
    the result of each operation, or one result if all are the same.

    On a GPU with triton the call compiles the kernels.
    """
    runs = Finding("runs", "use none of them, on any device; programs call them through cacheprobe.ops.dispatch")
    path_of = paths("cuda" if torch.cuda.is_available() else "cpu")
    result_of = {name: f"{path.runs}: {path.reason}" for name, path in path_of.items()}
    if len(set(result_of.values())) == 1:
        return [runs, Finding(f"all {len(result_of)}", next(iter(result_of.values())))]
    own = [
        Finding(name, result, path_of[name].runs == KERNEL, "the reference runs instead")
        for name, result in result_of.items()
    ]
    return [runs, *own]
