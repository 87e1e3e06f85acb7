"""Draws the thoughts of a Thinking States model: a picture of the chunks, their states and thoughts, and a card of
one chunk."""
