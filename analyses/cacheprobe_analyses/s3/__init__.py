"""Asks by which algorithm small models follow a permutation of three things."""
