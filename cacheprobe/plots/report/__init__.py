"""Writes the report of a request as one page, and its figures as files."""
