"""Imports generations of other programs as traces."""
