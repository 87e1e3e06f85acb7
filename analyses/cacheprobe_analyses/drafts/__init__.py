"""Asks at which layer a model settles on a token, and whether a rejected draft shows before it is verified."""
