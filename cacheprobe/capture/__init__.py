"""Captures states, lens readings and events while a run goes on."""
