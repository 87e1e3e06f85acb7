"""Measurements behind the README's numbers: one question a file, each with `run(rounds) -> dict`."""
