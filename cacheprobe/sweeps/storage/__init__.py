"""Commits the shards of a sweep, and controls who may write."""
