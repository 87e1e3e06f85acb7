"""Losses, short training loops and their checkpoints, with which the shipped models were trained."""
