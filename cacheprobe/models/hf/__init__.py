"""Runs Hugging Face models through TransformerLens' TransformerBridge: hooks may edit activations, and the results are
the reference for the fast forward."""
