"""Holds what all models around a transformers model share, and the model that runs through TransformerLens'
TransformerBridge: hooks may edit its activations, and its results are the reference for the plain model."""
