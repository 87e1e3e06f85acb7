"""Measures how well a dictionary reconstructs the states of a trace."""
