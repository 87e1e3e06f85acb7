"""Implements `cacheprobe stress`: compares random traffic, bit for bit, with the slow reference (`cp.reference`), and
runs a negative control.

The reference computes each request alone. The negative control shows that without verification the output depends on
the batch.
"""
