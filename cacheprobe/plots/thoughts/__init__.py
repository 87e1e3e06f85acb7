"""Draws the thoughts of a Thinking States model."""
