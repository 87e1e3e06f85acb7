"""Runs a model with draft heads of a finding's settings; heads that are missing are trained."""
