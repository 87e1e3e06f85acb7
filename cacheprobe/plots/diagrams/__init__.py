"""Draws diagrams as SVG: the KV cache, verify windows, timelines and cards of tokens."""
