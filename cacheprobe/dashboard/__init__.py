"""Runs `cacheprobe dash`: linked views over stored runs, in a browser. Each view is one file; `plots` draws the
figures.
"""
