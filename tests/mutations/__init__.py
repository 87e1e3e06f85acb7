"""Deliberate bugs, each put in place of a function for a moment, and the tests that must turn red under it."""
