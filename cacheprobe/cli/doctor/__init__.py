"""Implements `cacheprobe doctor`: checks what cacheprobe can use on this machine, and what is missing."""
