"""Builds the pandas tables of a trace: rows, lens readings, verdicts on draft tokens, thoughts, events, the ledger."""
