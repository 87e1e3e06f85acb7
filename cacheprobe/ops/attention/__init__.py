"""Attention over the KV cache: the slow reference, one call for each request, and a loop for one new token."""
