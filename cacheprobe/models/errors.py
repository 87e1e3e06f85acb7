"""The error of a model that cannot be used, in a file without torch: names are checked before it is imported."""


class ModelError(ValueError):
    """A model that cannot be used as asked; the message names the remedy."""
