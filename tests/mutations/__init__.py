"""Deliberate bugs, each put into the real code for a moment, and the invariants whose tests must turn red under it."""
