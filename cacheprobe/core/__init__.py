"""Defines what every other folder uses: records, settings, hook names, files, progress."""
