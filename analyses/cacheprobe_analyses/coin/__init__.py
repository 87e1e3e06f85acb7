"""Asks where a model keeps the state of the coin, and which of it the answer uses."""
