"""Defines the trace of a run: its tables and captured states; saves and loads traces."""
