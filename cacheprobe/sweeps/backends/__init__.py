"""Who runs the cells: one file each, found by the registry under "sweeps.backends"."""
