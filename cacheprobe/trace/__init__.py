"""Traces: tables and states of one run, saved, loaded and migrated."""
