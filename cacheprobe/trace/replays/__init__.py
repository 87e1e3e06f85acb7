"""Runs a model over tokens that another program generated, and compares the two programs' log-probabilities."""
