"""Records a run while it goes on: states, lens readings, the rows with their status, and events."""
