"""Loads models with quantised weights: GGUF files, and folders or live models of quantisation libraries."""
