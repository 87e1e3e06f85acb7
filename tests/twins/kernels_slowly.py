"""Slow references of what the kernels' references do, by the definitions and number by number."""

import math

from torch import Tensor


def pack_rows_slowly(states: Tensor, rows: list[int], out: Tensor) -> list[list[float]]:
    """The lines of `out` afterwards, number by number; NumPy and torch round one number alike."""
    b, t, m = states.shape
    lines = out.tolist()
    for line, row in zip(lines, rows, strict=True):
        if 0 <= row < b * t:
            line[:] = [float(states[row // t, row % t, column].to(out.dtype)) for column in range(m)]
    return lines


def attention_slowly(q: Tensor, keys: Tensor, values: Tensor, seen: list[int]) -> list[float]:
    """One query [dk] over the slots that it sees, keys [s dk] and values [s dv], in Python's own numbers."""
    scores = [math.fsum(float(a) * float(b) for a, b in zip(q, keys[s], strict=True)) for s in seen]
    weights = [math.exp(score - max(scores)) for score in scores]
    total = math.fsum(weights)
    return [
        math.fsum(w / total * float(values[s, column]) for w, s in zip(weights, seen, strict=True))
        for column in range(values.shape[1])
    ]
