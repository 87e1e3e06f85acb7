"""Runs sweeps: one file of settings, thousands of runs. Each run is committed complete and never repeated.

settings.py checks the file; cells.py lists its cells; checks.py refuses impossible ones before anything runs;
workers/holder.py holds one model and runs its cells; storage/ commits shards and locks the results; engine.py fixes the
order of steps; backends/ runs the cells; index.py and results.py read the results.
"""
