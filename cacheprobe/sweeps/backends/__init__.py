"""Contains the backends that run the cells of a sweep, one file each, registered as "sweeps.backends"."""
