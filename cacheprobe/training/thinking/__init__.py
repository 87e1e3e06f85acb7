"""Trains Thinking States models, and the arms (variants of the model) with which these models are compared."""
