"""`cacheprobe prove`: random traffic against the oracle, bit for bit; and its negative control."""
