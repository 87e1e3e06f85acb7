"""Draws published results that were measured again."""
