"""Computes from a stored trace which draft tokens a verifier would accept, without running the model."""
