"""Tells special tokens, and finds the tokens of answers, with any tokenizer."""
