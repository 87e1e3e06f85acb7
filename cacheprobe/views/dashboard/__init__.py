"""Runs `cacheprobe dash`: linked views of stored runs in a browser. Each tab is one file; `plots` draws the figures."""
