"""Measures what drafts cost, and decides how long they may be."""
