"""Trains LoRA adapters, Thinking States models and tuned lenses, with one loop and one checkpoint format."""
