"""Tables of a trace: rows, readings, verdicts of drafts, thoughts, events and the ledger."""
