"""The KV cache: its rows, who wrote each slot, masks, shared prefixes, and surgery."""
