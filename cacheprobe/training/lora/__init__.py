"""Trains LoRA adapters on coin-flip questions."""
