"""Runs mixtures of experts batch-invariantly, and reads and edits their routing."""
