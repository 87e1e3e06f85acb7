"""Runs the cells (runs) of a sweep: the queue, the loaded model, the run of one cell, and the worker process."""
