"""Hugging Face models by TransformerBridge: hooks may edit, and results are the reference."""
