"""Measures sweeps: their cost, whether backends give equal bytes, and whether they survive faults."""
