"""Attention over the KV cache: the slow reference, one call a request, and the loop of one new token."""
