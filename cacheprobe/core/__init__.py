"""Facts and helpers that every other room uses: records, settings, hook names, files, progress."""
