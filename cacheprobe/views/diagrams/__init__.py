"""Draws diagrams as SVG: the KV cache, verify windows, timelines, the lens grid and cards of tokens."""
