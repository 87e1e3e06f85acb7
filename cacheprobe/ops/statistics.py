"""Computes confidence intervals of shares."""

from statistics import NormalDist


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
