"""Computes gradients of a metric with respect to the states of a trace's or a prompt's tokens."""
