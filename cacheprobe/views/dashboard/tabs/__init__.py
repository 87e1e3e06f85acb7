"""Holds the views of the dashboard's tabs, one file each."""
