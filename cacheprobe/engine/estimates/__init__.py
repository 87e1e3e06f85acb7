"""Estimates passes, memory, disk space and time of a run before it starts."""
