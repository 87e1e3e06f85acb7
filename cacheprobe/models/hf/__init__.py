"""Hugging Face models through TransformerBridge: hooks may edit, and results are the reference."""
