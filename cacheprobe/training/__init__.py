"""Losses, the short loop and its checkpoints: how the models that this package ships were made."""
