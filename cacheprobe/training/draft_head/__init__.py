"""Trains draft heads on the states of a trace."""
