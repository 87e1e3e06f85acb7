"""What of a machine cacheprobe uses, and what is missing on it: `cacheprobe doctor`."""
