"""Defines ModelError without importing torch, so that model names can be checked before torch is loaded."""


class ModelError(ValueError):
    """Signals that a model cannot be loaded or used as requested; the message says why."""
