"""Losses, short training loops and their checkpoints: how the models that this package ships were made."""
