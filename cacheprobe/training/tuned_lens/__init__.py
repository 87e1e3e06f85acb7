"""Trains tuned lenses."""
