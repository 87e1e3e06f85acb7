"""Holds the tabs of the dashboard, one file each."""
