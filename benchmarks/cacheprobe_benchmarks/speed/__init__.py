"""Measures how fast the loop, a pass and its products are, and what each optimisation gains."""
