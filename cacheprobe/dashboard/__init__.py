"""`cacheprobe dash`: linked views over stored runs, in a browser. One file a view; figures come from `views`."""
