"""Sweeps: one file of settings, thousands of runs, each committed whole and never run twice.

settings.py what the file may say; cells.py its cells; checks.py what is refused before anything runs; holder.py one
model and its cells; store.py where shards are committed, clients.py how that is reached, lock.py and lease.py who may;
engine.py what is done in which order; backends/ who does it; index.py and results.py what comes of it.
"""
