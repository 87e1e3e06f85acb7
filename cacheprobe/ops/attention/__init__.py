"""Attention over the KV cache: the slow reference, one call a request, and the compiled loops of a few new tokens."""
