"""The 27 invariants of decode, verify, commit or roll back: tests named after them, each able to fail.

Every test here is a plain function without fixtures, so that `tests.mutations` can call it over damaged code.
"""
