"""Triton kernels, one a file; the registry finds them as `kernels`. Nothing in cacheprobe needs them to run."""
