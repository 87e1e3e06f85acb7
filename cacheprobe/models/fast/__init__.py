"""Implements the fast forward of Hugging Face models (`HookedHF`): fused attention on the bridge's weights, without the
bridge's hooks."""
