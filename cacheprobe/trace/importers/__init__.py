"""Imports generations of other programs (Hugging Face's generate, vLLM) as traces."""
