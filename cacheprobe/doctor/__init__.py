"""Checks what cacheprobe can use on this machine, and what is missing: `cacheprobe doctor`."""
