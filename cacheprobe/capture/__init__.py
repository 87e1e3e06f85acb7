"""Captures states, lens readings and events during a run."""
