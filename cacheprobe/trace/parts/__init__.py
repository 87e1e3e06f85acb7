"""Reads a run that is being recorded to disk, part by part: its journal, and its tables and states so far."""
