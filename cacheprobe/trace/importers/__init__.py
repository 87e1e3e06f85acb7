"""Imports what other programs kept of a generation."""
