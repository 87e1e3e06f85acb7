"""Draws the thoughts of a Thinking States model: a picture of chunks, chunk states and thoughts, and a card of one
chunk in numbers."""
