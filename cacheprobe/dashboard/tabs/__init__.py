"""The tabs of the dashboard, one file each."""
