"""Holds the backends that run the cells, one file each; the registry finds them under "sweeps.backends"."""
