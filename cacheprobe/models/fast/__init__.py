"""Computes the forward of a plain transformers model faster than its modules do: by operations in compiled loops or
kernels, and without calling modules."""
