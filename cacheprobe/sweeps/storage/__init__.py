"""Stores the shards (saved runs) of a sweep in a folder or an object store, and lets only one sweep write."""
