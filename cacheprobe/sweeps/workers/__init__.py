"""Runs the cells of a sweep in worker processes."""
