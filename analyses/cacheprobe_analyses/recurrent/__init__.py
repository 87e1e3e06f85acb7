"""Analyses of models with a recurrent state."""
