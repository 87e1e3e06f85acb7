"""Measures published results again with cacheprobe: each finding is one file, which `cacheprobe findings` finds."""
