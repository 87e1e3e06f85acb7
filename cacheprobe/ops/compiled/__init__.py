"""Computes matrix products and readings of a CPU in loops that numba compiles for the processor at hand."""
