"""Holds what several benchmarks use: the machine, the traffic, and Hugging Face's model."""
