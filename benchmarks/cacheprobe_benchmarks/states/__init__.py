"""Measures what recording, reading and patching states costs."""
