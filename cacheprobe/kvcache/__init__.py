"""Holds the KV cache: its rows (one for each sequence), the provenance of each slot, masks, shared prefixes, and
surgery on cached keys and values."""
