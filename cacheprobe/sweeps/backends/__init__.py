"""Contains the backends that run the cells (runs) of a sweep, one file each, registered as "sweeps.backends"."""
