"""Computes confidence intervals of shares, and correlations of two grids."""

from collections.abc import Sequence
from statistics import NormalDist, StatisticsError, correlation


def wilson(share: float, number: float) -> tuple[float, float]:
    """Returns (low, high), Wilson's 95 % score interval of a share in 0..1 among `number` independent trials, which
    need not be a whole number.

    Source: Wilson 1927, "Probable inference".  Twin: scipy's binomtest(...).proportion_ci(method="wilson"),
    close(1e-12) for whole numbers.
    """
    z = NormalDist().inv_cdf(0.975)  # 2.5 % lie outside on each side
    centre = share + z * z / (2 * number)
    half_width = z * (share * (1 - share) / number + z * z / (4 * number * number)) ** 0.5
    scale = 1 + z * z / number
    low, high = (centre - half_width) / scale, (centre + half_width) / scale
    return max(0.0, min(low, share)), min(1.0, max(high, share))  # rounding must not exclude the share itself


def cell_correlations(
    positions: Sequence[int], first: Sequence[float], second: Sequence[float]
) -> tuple[float | None, float | None]:
    """Returns (Pearson, Spearman) correlation of two grids, from the position and both values of each cell; None if a
    grid is constant. Positions at which all cells of both grids are 0 are left out.

    Spearman's is Pearson's of the ranks, with equal numbers at their mean rank.
    Twin: scipy's pearsonr and spearmanr, close(1e-12).
    """
    used = {position for position, *values in zip(positions, first, second, strict=True) if any(values)}
    chosen = [pair for position, *pair in zip(positions, first, second, strict=True) if position in used]
    sides = [[pair[i] for pair in chosen] for i in (0, 1)]
    return _correlation(*sides), _correlation(*map(_ranks, sides))


def _correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Returns Pearson's correlation, or None if a side is constant or has fewer than two numbers."""
    try:
        return correlation(first, second)
    except StatisticsError:
        return None


def _ranks(values: Sequence[float]) -> list[float]:
    """Returns the rank of each number, from 0; equal numbers have their mean rank."""
    places: dict[float, list[int]] = {}
    for place, value in enumerate(sorted(values)):
        places.setdefault(value, []).append(place)
    return [sum(places[value]) / len(places[value]) for value in values]
