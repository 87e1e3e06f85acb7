"""Measures, on tiny random models, what cacheprobe can do with every decoder family of the installed transformers."""
