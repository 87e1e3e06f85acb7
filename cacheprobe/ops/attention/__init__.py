"""Computes attention over the KV cache: a slow reference, one call for each request, and compiled loops for few new
tokens."""
