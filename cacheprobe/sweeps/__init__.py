"""Runs sweeps: thousands of runs from one file of settings. A cell is one run; its saved result is a shard.

A shard is written complete or not at all, and a cell with a shard is never run again.

settings.py checks the file; cells.py lists its cells; plan.py refuses impossible ones before anything runs; run_cell.py
runs one cell, and backends.py all of them; store.py commits their shards, which are the only state of a sweep, so a
sweep that was killed goes on where it stopped; results.py reads them.
"""
