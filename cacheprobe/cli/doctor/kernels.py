"""Reports which Triton kernel computes which operation of a run on this machine."""

import torch

from cacheprobe.cli.doctor.findings import Finding
from cacheprobe.ops.dispatch import KERNEL, paths
from cacheprobe.ops.kernel_set import choose_kernels

USES = {
    "rms_norm": "norms of llama-like models",
    "matmul": "products",
    "cached_attention": "attention of the fast forward",
    "lens_topk": "readings of Z",
    "store_kv": "cache writes",
    "capture_pack": "copies of captured rows",
}
"""What each kernel computes in a run."""


def kernels() -> list[Finding]:
    """Returns a list of findings on the Triton kernels. The first says whether runs use them on this machine; the
    others name for each operation of a run its kernel, or give one reason if no kernel can run.

    On a GPU with triton the call compiles the kernels.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    path_of = paths(device)
    chosen = choose_kernels(torch.bfloat16, device)
    if chosen.kernels is None:
        runs = Finding("runs", f"use none; torch or compiled loops compute instead ({chosen.reason})")
    elif device == "cpu":
        runs = Finding("runs", f'use all with products="kernels", else none; {chosen.kernels.text}')
    else:
        runs = Finding("runs", f"on {device} use all; {chosen.kernels.text}")
    if len({path.reason for path in path_of.values()}) == 1 and chosen.kernels is None:
        return [runs]
    return [
        runs,
        *(
            Finding(
                USES[name], f"{name}, {path.runs}: {path.reason}", path.runs == KERNEL, "torch computes all instead"
            )
            for name, path in path_of.items()
        ),
    ]
