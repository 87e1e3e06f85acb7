"""Writes the report of one request as an HTML page, its figures as files, and listings of a run for a terminal."""
