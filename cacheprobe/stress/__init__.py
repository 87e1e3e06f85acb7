"""Runs `cacheprobe stress`: compares random traffic with the oracle bit for bit, and runs a negative control.

The oracle is `cp.reference`, which computes each request alone.
"""
