"""Where shards of a sweep are committed, and who may write there."""
