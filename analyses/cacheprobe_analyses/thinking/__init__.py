"""Asks how well models that think while they read do, why, and what it costs."""
