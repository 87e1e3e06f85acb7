"""Implements Thinking States models: blocks, cache, tokenizer and files."""
