"""Trains small topk dictionaries on the states of a trace."""
