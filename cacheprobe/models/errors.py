"""ModelError, in a file that does not import torch, so that model names are checked before torch is loaded."""


class ModelError(ValueError):
    """A model cannot be used as requested; the message says what to do."""
