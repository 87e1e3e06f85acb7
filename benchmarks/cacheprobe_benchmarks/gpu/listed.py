"""Lists the checks of `make gpu`, the smallest first, without importing torch."""

from typing import NamedTuple

KERNELS = ("store_kv", "capture_pack", "rms_norm", "matmul", "cached_attention", "lens_topk")


class Check(NamedTuple):
    """Describes a check, which runs in a process of its own."""

    name: str
    what: str
    """What the check does, for `--list`."""
    seconds: float
    """Estimate, until a run has measured it: no GPU has been at hand yet."""
    limit: float
    """Seconds after which the process is killed."""


CHECKS = (
    Check("device", "the GPU, its memory, versions of libraries, the rates of a copy and of a product", 15, 60),
    *(Check(name, "the kernel against its reference, small and at shapes of real models", 15, 60) for name in KERNELS),
    Check("patching", "a grid of activation patching in kernels against torch on the CPU, float32", 25, 90),
    Check("loop", "tokens, labels, states and readings of a run in kernels against the CPU, float32", 25, 90),
    Check("determinism", "a request alone and beside others, both ways, with a planted fault as control", 40, 120),
    Check("roofs", "each kernel's time beside the least that its bytes and products take", 30, 120),
    Check("smollm2-135m", "the main job of SmolLM2, beside Hugging Face's generate and the roofline", 45, 150),
    Check("random-1b", "the main job of a random model of 1 billion weights", 45, 150),
    Check("random-8b", "the main job of a random model of 8 billion weights", 90, 300),
)
"""The order in which they run. `device` always runs, since others use its rates."""
