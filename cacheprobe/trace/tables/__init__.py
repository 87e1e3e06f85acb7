"""Builds the tables of a trace: rows, readings, verdicts on drafts, thoughts, events and the ledger."""
