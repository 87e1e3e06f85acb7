"""Implements the fast forward of Hugging Face models (`FastLM`): fused attention on the bridge's weights, without the
bridge's hooks."""
