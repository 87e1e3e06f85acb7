"""Runs `cacheprobe dash`: linked views of stored runs in a browser. Each view is a class in `tabs`; the rooms beside
this one draw the figures."""
