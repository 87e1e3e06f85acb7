"""Holds the tables and states of one run; saves, loads and migrates them."""
