"""Gives what a view shows to take away: its table as CSV, and the Python code that makes the same in a notebook.

`views.AWAY` declares each view in one line. assets/away.js draws SVG and PNG from the page, and copies links.
"""
