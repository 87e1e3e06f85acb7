"""Runs plain transformers models as CachedLM, without a TransformerBridge."""
