"""Trains tuned lenses: an affine map (translator) after each block, from which the unembedding predicts tokens."""
