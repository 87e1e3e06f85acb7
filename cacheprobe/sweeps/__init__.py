"""Runs sweeps: thousands of runs from one file of settings. A cell is one run; its saved result is a shard.

A shard is written complete or not at all, and a cell with a shard is never run again.

settings.py checks the file; cells.py lists its cells; checks.py refuses impossible ones before anything runs;
workers/holder.py holds one model and runs its cells; storage/ commits shards and locks the results; engine.py fixes the
order of steps; backends/ runs the cells; index.py and results.py read the results.
"""
