"""Measures what the README says in numbers: one question a file, each with `run(rounds) -> dict`."""
