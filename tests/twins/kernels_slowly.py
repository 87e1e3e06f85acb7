"""Slow references of what the kernels' references do, by the definitions and number by number."""

import math
from fractions import Fraction

import numpy as np
from torch import Tensor


def pack_rows_slowly(states: Tensor, rows: list[int]) -> tuple[list[list[int]], list[float]]:
    """int8 and scales: the nearest whole number of scales, of two equally near the even one; exact fractions decide."""
    b, t, m = states.shape
    values, scales = [], []
    for row in rows:
        numbers = [float(states[row // t, row % t, column]) if 0 <= row < b * t else math.nan for column in range(m)]
        if not all(math.isfinite(x) for x in numbers):
            values.append([0] * m)
            scales.append(math.nan)
            continue
        scale = float(np.float32(max(abs(x) for x in numbers)) / np.float32(127))
        values.append([round(Fraction(float(np.float32(x) / np.float32(scale)))) if scale else 0 for x in numbers])
        scales.append(scale)
    return values, scales


def attention_slowly(q: Tensor, keys: Tensor, values: Tensor, seen: list[int]) -> list[float]:
    """One query [dk] over the slots that it sees, keys [s dk] and values [s dv], in Python's own numbers."""
    scores = [math.fsum(float(a) * float(b) for a, b in zip(q, keys[s], strict=True)) for s in seen]
    weights = [math.exp(score - max(scores)) for score in scores]
    total = math.fsum(weights)
    return [
        math.fsum(w / total * float(values[s, column]) for w, s in zip(weights, seen, strict=True))
        for column in range(values.shape[1])
    ]
