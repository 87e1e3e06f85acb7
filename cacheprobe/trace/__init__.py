"""Defines the trace of a run: its tables and captured states; saves, loads and migrates traces."""
