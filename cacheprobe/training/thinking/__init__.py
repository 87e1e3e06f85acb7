"""Trains Thinking States models and the arms that they are compared with."""
